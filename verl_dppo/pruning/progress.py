"""How many steps a training has left when steps draw different numbers of prompts."""


def planned_steps(
    done: int,
    drawn: int,
    prompts: int,
    warmup_prompts: int,
    batch_size: int,
    next_step: int,
    steady: int,
    anneal_fraction: float,
) -> int:
    """Return the total number of steps after which at least `prompts` prompts were drawn.

    Args:
        done: steps that were taken.
        drawn: prompts that they drew.
        prompts: that the whole training draws, e.g. passes times rows of the data set.
        warmup_prompts: while fewer than these were drawn, and in annealed steps, a step draws `batch_size`.
        batch_size: > 0.
        next_step: what the next step draws if it is not annealed, >= `batch_size`; past steps tell it exactly.
        steady: what every other step draws, >= `batch_size`.
        anneal_fraction: share of all steps, at their end, that are annealed; see `DPPOSettings.anneals`.

    Returns:
        The steps, those that are done included; not below `done`.
    """

    def drawn_after(total: int) -> int:
        left = total - done
        pruned = left - min(left, round(anneal_fraction * total))
        if pruned <= 0:
            return drawn + left * batch_size
        after_next = drawn + next_step
        warming = max(0, -(-(min(warmup_prompts, prompts) - after_next) // batch_size))
        skipping = max(pruned - 1 - warming, 0)
        return after_next + (left - 1) * batch_size + skipping * (steady - batch_size)

    least, enough = done, done + max(0, -(-(prompts - drawn) // batch_size))
    while least < enough:
        middle = (least + enough) // 2
        least, enough = (least, middle) if drawn_after(middle) >= prompts else (middle + 1, enough)
    return least
