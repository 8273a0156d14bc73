"""The rows of a draw, arranged for the ranks as the product arranges them, in the columns that verl's workers take."""

from dataclasses import dataclass

import numpy as np
import torch
from cpu.tiny import EOS
from engine.cases import ALGORITHMS, PI, PROMPT, PROMPT_PI, PROMPTS, RESPONSE, ROWS, Case
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT
from verl_dppo.training.transform import rank_order

PADDING = -1
VOCABULARY = 32


@dataclass(frozen=True)
class Completions:
    """The columns of the six rows that no draw changes, one tensor for each row."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    old_log_probs: list[torch.Tensor]
    ref_log_prob: list[torch.Tensor]


def completions(model: torch.nn.Module) -> Completions:
    """Make them: tokens at random, old log-probs so far from the model's that ratios clip on both sides."""
    rng = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in PROMPT]
    responses = [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in RESPONSE]
    old, ref = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, prompt.numel() - 1 : -1]
        log_probs = torch.log_softmax(logits.double(), -1).gather(1, response[:, None])[:, 0]
        for column, scale in ((old, 0.25), (ref, 0.4)):
            column.append(log_probs + scale * torch.randn(response.numel(), generator=rng, dtype=torch.float64))
    return Completions(prompts, responses, old, ref)


def arrange(drawn: list[tuple[int, ...]], case: Case, ranks: int) -> list[list[tuple[int, int]]]:
    """Return (row, mini-batch) of every place of every rank, the same number of rows in every mini-batch.

    What a draw lacks is padding; an empty draw leaves its first completion, which then weighs 0.
    """
    multiple = ranks * max(1, case.micro)
    rows = max(1, -(-max(len(kept) for kept in drawn) // multiple)) * multiple
    places = []
    for k, (kept, members) in enumerate(zip(drawn, case.members, strict=True)):
        chosen = list(kept) or members[:1]
        places += [(row, k) for row in chosen + [PADDING] * (rows - len(chosen))]
    lengths = [2 if row == PADDING else PROMPT[row] + RESPONSE[row] for row, _ in places]
    order, _ = rank_order(lengths, np.array([k for _, k in places]), ranks)
    return [[places[i] for i in part] for part in np.array_split(order, ranks)]


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sequence_columns(
    prompts: list[torch.Tensor], responses: list[torch.Tensor], mask: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the columns that follow from the tokens of each row and the mask of its response."""
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    return {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(s.numel()) for s in sequences]),
        "response_mask": nested(mask),
        "loss_mask": nested(mask),
    }


def batch(
    places: list[tuple[int, int]],
    rows: Completions,
    case: Case,
    places_of_all: int,
    drawn: list[tuple[int, ...]] | None,
) -> TensorDict:
    """Build what `update_actor` of one rank gets; without `drawn` it is the batch of stock verl.

    Args:
        places: (row, mini-batch) of this rank, mini-batch after mini-batch.
        rows: columns of the six completions.
        case: what is enumerated.
        places_of_all: rows of all ranks.
        drawn: rows that the draw kept, for each mini-batch.
    """
    advantages = ALGORITHMS[case.algorithm].advantages()
    pad = torch.tensor([EOS])
    nothing = torch.zeros(1, dtype=torch.float64)

    def column(of_row: list[torch.Tensor], of_padding: torch.Tensor) -> list[torch.Tensor]:
        return [of_padding if row == PADDING else of_row[row] for row, _ in places]

    prompts, responses = column(rows.prompts, pad), column(rows.responses, pad)
    mask = column([torch.ones(n, dtype=torch.long) for n in RESPONSE], torch.zeros(1, dtype=torch.long))
    columns = {
        **sequence_columns(prompts, responses, mask),
        "old_log_probs": nested(column(rows.old_log_probs, nothing)),
        "ref_log_prob": nested(column(rows.ref_log_prob, nothing)),
        "advantages": nested(column([a.expand(n) for a, n in zip(advantages, RESPONSE, strict=True)], nothing)),
    }
    rows_of_mini_batch = ROWS // case.mini_batches
    if drawn is not None:
        weight, tokens, size = _weights(case, drawn), _tokens(case, drawn), _sizes(case, drawn)
        columns[WEIGHT] = torch.tensor([weight.get(row, 0.0) for row, _ in places], dtype=torch.float64)
        columns[BATCH_NUM_TOKENS] = torch.tensor([tokens[k] for _, k in places], dtype=torch.float64)
        columns[GLOBAL_BATCH_SIZE] = torch.tensor([size[k] for _, k in places], dtype=torch.float64)
        rows_of_mini_batch = places_of_all // case.mini_batches  # what the loss must not divide by
    data = TensorDict(columns, batch_size=[len(places)])
    tu.assign_non_tensor(
        data,
        calculate_entropy=case.entropy,
        global_batch_size=rows_of_mini_batch,
        mini_batch_size=places_of_all // case.mini_batches,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        use_dynamic_bsz=not case.micro,
        max_token_len_per_gpu=16,
        micro_batch_size_per_gpu=case.micro,
    )
    return data


def _weights(case: Case, drawn: list[tuple[int, ...]]) -> dict[int, float]:
    kept = [row for rows in drawn for row in rows]
    if case.fault == "weights dropped":
        return dict.fromkeys(kept, 1.0)
    of_prompt = dict.fromkeys(range(ROWS), 1.0)
    if case.two_levels and case.fault != "prompt weights left out":
        of_prompt = {row: 1 / pi for pi, rows in zip(PROMPT_PI, PROMPTS, strict=True) for row in rows}
    return {row: of_prompt[row] / PI[row] for row in kept}


def _tokens(case: Case, drawn: list[tuple[int, ...]]) -> list[float]:
    """Response tokens that each mini-batch divides by: those from before the draw."""
    if case.fault == "tokens of the kept rows":
        return [float(max(1, sum(RESPONSE[row] for row in rows))) for rows in drawn]
    return [sum(case.tokens)] * len(case.tokens) if case.fault == "tokens of the whole batch" else case.tokens


def _sizes(case: Case, drawn: list[tuple[int, ...]]) -> list[float]:
    """Completions that each mini-batch divides by: those from before the draw."""
    counted = drawn if case.fault == "rows of the kept rows" else case.members
    return [float(max(1, len(rows))) for rows in counted]
