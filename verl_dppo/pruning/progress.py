"""How many steps a training has left when steps draw different numbers of prompts."""


def planned_steps(
    done: int, drawn: int, prompts: int, warmup_prompts: int, batch_size: int, steady: int, anneal_fraction: float
) -> int:
    """Return the total number of steps after which at least `prompts` prompts were drawn.

    Args:
        done: steps that were taken.
        drawn: prompts that they drew.
        prompts: that the whole training draws, e.g. passes times rows of the data set.
        warmup_prompts: while fewer than these were drawn, and in annealed steps, a step draws `batch_size`.
        batch_size: > 0.
        steady: what every other step draws, >= `batch_size`.
        anneal_fraction: share of all steps, at their end, that are annealed; see `DPPOSettings.anneals`.

    Returns:
        The steps, those that are done included; not below `done`.
    """

    def drawn_after(total: int) -> int:
        warming = max(0, -(-(min(warmup_prompts, prompts) - drawn) // batch_size))
        left = total - done
        skipping = max(left - warming - round(anneal_fraction * total), 0)
        return drawn + left * batch_size + skipping * (steady - batch_size)

    least, enough = done, done + max(0, -(-(prompts - drawn) // batch_size))
    while least < enough:
        middle = (least + enough) // 2
        least, enough = (least, middle) if drawn_after(middle) >= prompts else (middle + 1, enough)
    return least
