"""The demo task: reasoning-gym's chain sums and a byte-level policy small enough to train without a GPU."""

from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
"""The warm-started policy: weights, config and tokenizer, as `from_pretrained` reads them."""
