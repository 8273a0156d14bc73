import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from training.demo_rows import as_verl, demo_rows
from verl.utils.dataset.rl_dataset import collate_fn

from verl_dppo.training.row_loader import RowLoader


class Mixed(Dataset):
    """Items with tensors, numbers, texts and objects of different sizes; counts what was read in this process."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 20

    def __getitem__(self, row):
        self.read.append(row)
        return {
            "tensor": torch.full((2, 3), float(row)),
            "number": row,
            "text": f"row {row}",
            "list": list(range(row % 4)),
            "object": {"row": [row]},
        }


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert type(one[name]) is type(other[name])
        assert one[name].dtype == other[name].dtype
        assert one[name].shape == other[name].shape
        assert one[name].tolist() == other[name].tolist()


REQUESTS = [[3, 1, 2, 19, 0], [5, 5, 5, 1, 5], [7], [2, 4], list(range(20))[::-1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_as_verl_collates_them_in_the_order_asked_for_again_and_again(workers):
    loader, dataset = RowLoader(Mixed(), workers), Mixed()
    for rows in REQUESTS:
        found = loader.fetch(rows)
        same(found, collate_fn([dataset[row] for row in rows]))
        assert found["number"].tolist() == rows
        assert found["tensor"][:, 0, 0].tolist() == rows


def test_without_workers_only_the_rows_asked_for_are_read():
    dataset = Mixed()
    loader = RowLoader(dataset, 0)
    loader.fetch([4, 2, 4])
    loader.fetch([1])
    assert dataset.read == [4, 2, 4, 1]


def test_workers_stay_from_one_fetch_to_the_next():
    class WithPid(Mixed):
        def __getitem__(self, row):
            return {"pid": torch.utils.data.get_worker_info().id, "seed": torch.initial_seed()}

    loader = RowLoader(WithPid(), 2)
    first, second = loader.fetch([0, 1, 2, 3]), loader.fetch([4, 5, 6, 7])
    assert set(first["pid"]) == {0, 1}, "the rows were not shared out"
    assert first["seed"].tolist() == second["seed"].tolist(), "new workers were started"


def test_an_error_in_a_row_is_raised_and_the_next_fetch_is_right():
    class Broken(Mixed):
        def __getitem__(self, row):
            if row == 3:
                raise RuntimeError("row 3 is broken")
            return super().__getitem__(row)

    loader = RowLoader(Broken(), 0)
    with pytest.raises(RuntimeError, match="row 3 is broken"):
        loader.fetch([1, 2, 3, 4])
    assert loader.fetch([5, 6, 7])["number"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_verls_data_set_come_as_its_own_loader_gives_them(tmp_path, workers):
    dataset = as_verl(tmp_path, demo_rows(tmp_path, 8))
    found = RowLoader(dataset, workers).fetch([6, 0, 6])
    same(found, collate_fn([dataset[row] for row in (6, 0, 6)]))
    assert found["index"].tolist() == [6, 0, 6]
    assert isinstance(found["raw_prompt"], np.ndarray)
