import copy
import datetime
import io
import logging

import datasets
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from training.demo_rows import as_verl, demo_rows
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_dppo.settings import RefusedSettingError
from verl_dppo.training.prompt_ids import fingerprint, prompt_ids

DATA = OmegaConf.create({})


class Plain(list):
    """A data set that holds no table: items as a user's own class would give them."""


class Table(RLHFDataset):
    """What is read of verl's data set, without the file."""

    def __init__(self, rows, features=None):
        self.dataframe = datasets.Dataset.from_list(rows, features=features)


class Backwards(Table):
    """A class of a user's own, which serves the rows of its table in another order."""

    def __getitem__(self, row):
        item = self.dataframe[len(self) - 1 - row]
        return {"raw_prompt": item["prompt"], "data_source": item["data_source"]}


def row(text, **columns):
    return {"raw_prompt": [{"role": "user", "content": text}], "data_source": "here", **columns}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return demo_rows(tmp_path_factory.mktemp("rows"), 12)


@pytest.fixture(scope="module")
def ids(rows, tmp_path_factory):
    return prompt_ids(as_verl(tmp_path_factory.mktemp("data"), rows), DATA)


def test_a_class_of_ones_own_is_asked_for_its_rows(rows):
    assert prompt_ids(Backwards(rows), DATA) == prompt_ids(Plain(as_items(rows)), DATA)[::-1]


def as_items(rows):
    return [{"raw_prompt": item["prompt"], "data_source": item["data_source"]} for item in rows]


# ---- the content of a row -------------------------------------------------------------------------------------------


def test_every_prompt_has_an_id_of_16_characters_of_its_own(ids):
    assert len(set(ids)) == 12
    assert {len(name) for name in ids} == {16}
    assert all(name.isascii() for name in ids)


def test_ids_stay_when_the_file_is_reordered_and_when_rows_are_added(rows, ids, tmp_path):
    order = np.random.default_rng(0).permutation(12)
    reordered = prompt_ids(as_verl(tmp_path / "a", [rows[k] for k in order]), DATA)
    assert reordered == [ids[k] for k in order]
    more = prompt_ids(as_verl(tmp_path / "b", demo_rows(tmp_path / "c", 5, seed=7) + rows), DATA)
    assert more[5:] == ids


def test_ids_stay_when_added_rows_bring_fields_that_the_others_lack(rows, ids, tmp_path):
    added = copy.deepcopy(rows[0])
    added["prompt"].insert(0, {"role": "system", "content": "Add.", "name": "teacher"})
    more = prompt_ids(as_verl(tmp_path, [*rows, added]), DATA)
    assert more[:12] == ids
    assert more[12] not in ids


def test_what_is_not_asked_does_not_name_a_prompt(rows, ids, tmp_path):
    others = copy.deepcopy(rows)
    for k, other in enumerate(others):
        other["extra_info"]["index"] = 100 - k
        other["reward_model"]["ground_truth"] = "?"
    assert prompt_ids(as_verl(tmp_path, others), DATA) == ids


def test_a_data_set_without_a_table_gives_the_ids_of_its_items(rows, ids):
    plain = Plain({"raw_prompt": r["prompt"], "data_source": r["data_source"], "index": 0} for r in rows)
    assert prompt_ids(plain, DATA) == ids
    assert prompt_ids(Plain(reversed(plain)), DATA) == ids[::-1]


def test_the_items_of_verls_data_set_have_the_ids_of_its_table(rows, ids, tmp_path):
    dataset = as_verl(tmp_path, rows)
    assert prompt_ids(Plain(dataset[k] for k in range(12)), DATA) == ids


@pytest.mark.parametrize("change", [{"role": "system"}, {"content": "1 + 1 = "}])
def test_another_word_or_role_is_another_prompt(change):
    one = row("1 + 1 =")
    other = {**one, "raw_prompt": [one["raw_prompt"][0] | change]}
    assert len(set(prompt_ids(Plain([one, other]), DATA))) == 2


def test_the_same_prompt_of_two_data_sources_is_two(rows, tmp_path):
    twins = [copy.deepcopy(rows[0]) | {"data_source": name} for name in ("a", "b")]
    assert len(set(prompt_ids(as_verl(tmp_path, twins), DATA))) == 2
    assert len(set(prompt_ids(Plain([row("x"), row("x") | {"data_source": None}]), DATA))) == 2


def test_prompts_that_repeat_share_an_id_and_the_log_says_so(rows, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = prompt_ids(as_verl(tmp_path, [*rows[:3], rows[1]]), DATA)
    assert found[3] == found[1]
    assert "4 rows of the data set are 3 different prompts" in caplog.text


def test_where_none_repeat_nothing_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        prompt_ids(Plain([row("a"), row("b")]), DATA)
    assert not caplog.records


def test_the_prompt_may_stand_in_a_column_of_another_name(rows, ids, tmp_path):
    renamed = [{("question" if name == "prompt" else name): value for name, value in r.items()} for r in rows]
    table = Table(renamed)
    assert prompt_ids(table, OmegaConf.create({"prompt_key": "question"})) == ids


def test_more_rows_than_are_read_at_a_time_are_all_named():
    table = Table([{"prompt": [{"role": "user", "content": str(k)}], "data_source": "here"} for k in range(2300)])
    found = prompt_ids(table, DATA)
    assert len(found) == len(set(found)) == 2300
    assert found[1999:2001] == prompt_ids(Plain([row("1999"), row("2000")]), DATA)


# ---- media ----------------------------------------------------------------------------------------------------------


def picture(value, size=(4, 2)):
    return Image.new("L", size, value)


def png(value):
    file = io.BytesIO()
    picture(value).save(file, "PNG")
    return file.getvalue()


def distinct(media, key="images", data=DATA):
    """How many different prompts the same words are with each of these media."""
    return len(set(prompt_ids(Plain(row("What is this?", **{key: [medium]}) for medium in media), data)))


def test_the_same_words_with_other_pictures_are_other_prompts():
    assert distinct([picture(0), picture(9), picture(0)]) == 2
    assert distinct([{"bytes": png(0)}, {"bytes": png(9)}, {"bytes": png(0)}]) == 2
    assert distinct([picture(0, (4, 2)), picture(0, (2, 4)), picture(0, (8, 1))]) == 3
    assert distinct([np.zeros((2, 4)), np.zeros((4, 2)), np.zeros((2, 4))]) == 2
    assert distinct([torch.zeros(2, 4), torch.ones(2, 4)]) == 2
    assert distinct([png(0), png(9)], "videos") == 2
    assert distinct([png(0), png(9)], "sounds", OmegaConf.create({"audio_key": "sounds"})) == 2
    assert distinct([png(0), png(9)], "unheard of") == 1


def test_pictures_inside_of_messages_count():
    found = [
        [{"role": "user", "content": [{"type": "image", "image": picture(value)}, {"type": "text", "text": "?"}]}]
        for value in (0, 9, 0)
    ]
    names = prompt_ids(Plain({"raw_prompt": prompt} for prompt in found), DATA)
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("decode", [True, False])
def test_pictures_of_a_table_count_decoded_or_not(decode):
    messages = datasets.Value("string")
    features = datasets.Features({"prompt": messages, "images": [datasets.Image(decode=decode)]})
    table = Table([{"prompt": "?", "images": [{"bytes": png(value), "path": None}]} for value in (0, 9, 0)], features)
    names = prompt_ids(table, DATA)
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("content", [object(), {1, 2}, lambda: 1])
def test_what_has_no_content_is_refused_with_the_way_out(content):
    with pytest.raises(RefusedSettingError, match=f"holds a {type(content).__name__}.*name a column"):
        prompt_ids(Plain([row("a", images=[content])]), DATA)


def test_scalars_of_libraries_and_dates_have_content():
    values = [np.int64(3), np.float32(0.5), datetime.date(2020, 1, 2), torch.tensor(3.5), np.array([b"x"], object)]
    assert len(set(prompt_ids(Plain(row("a", images=value) for value in values), DATA))) == len(values)


# ---- a column of the user's own -------------------------------------------------------------------------------------


def test_a_column_may_name_prompts_also_one_inside_of_another(rows, tmp_path):
    dataset = as_verl(tmp_path, rows)
    inside = prompt_ids(dataset, DATA, "extra_info.index")
    assert len(set(inside)) == 12
    changed = copy.deepcopy(rows)
    for other in changed:
        other["prompt"][0]["content"] += " please"
    assert prompt_ids(as_verl(tmp_path / "b", changed[::-1]), DATA, "extra_info.index") == inside[::-1]
    assert prompt_ids(Plain(dataset[k] for k in range(12)), DATA, "extra_info.index") == inside
    table = Table([{"key": k, "prompt": "same"} for k in ("a", "b")])
    assert len(set(prompt_ids(table, DATA, "key"))) == 2


def test_ids_that_repeat_across_sources_stay_apart():
    table = Table([{"key": k, "data_source": s, "prompt": "?"} for s in ("a", "b") for k in (1, 2)])
    assert len(set(prompt_ids(table, DATA, "key"))) == 4


def test_a_column_that_repeats_within_a_source_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        found = prompt_ids(Table([{"key": k, "data_source": "a"} for k in (1, 2, 2)]), DATA, "key")
    assert found[1] == found[2] != found[0]
    assert "3 rows of the data set are 2 different prompts" in caplog.text


@pytest.mark.parametrize(
    ("columns", "name", "message"),
    [
        ([{"key": 1}, {"key": 2}], "other", r"nothing there; its columns are .*key.*leave it null"),
        ([{"key": {"a": 1}}, {"key": {"a": 2}}], "key.b", r"nothing there.*leave it null"),
        ([{"key": 1}, {"key": 2}], "key.a", r"nothing there.*leave it null"),
        ([{"key": 1}, {"key": None}], "key", r"nothing there.*name another column"),
        ([{"key": {"a": 1}}, {"key": None}], "key.a", r"nothing there.*name another column"),
        (
            [{"key": 0}, {"key": 0}, {"key": 0}],
            "key",
            r"all 3 rows of the data source here have the same value.*leave it null",
        ),
    ],
)
def test_a_column_that_names_no_prompts_is_refused_with_the_way_out(columns, name, message):
    rows = [row(str(k)) | columns[k] for k in range(len(columns))]
    for dataset in (Plain(rows), Table([{**r, "prompt": r["raw_prompt"]} for r in rows])):
        with pytest.raises(RefusedSettingError, match=rf"algorithm\.dppo\.prompt\.id_column={name}.*{message}"):
            prompt_ids(dataset, DATA, name)


def test_a_data_set_of_one_row_may_have_a_column_of_one_value():
    assert len(prompt_ids(Plain([row("a", key=0)]), DATA, "key")) == 1


def test_items_without_a_prompt_are_refused_with_the_way_out():
    with pytest.raises(RefusedSettingError, match=r"no 'raw_prompt'.*name a column that tells prompts apart"):
        prompt_ids(Plain([{"input_ids": 1}]), DATA)


# ---- the data set as a whole ----------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_prompts_in_their_order(ids):
    others = [ids[::-1], ids[:-1], [*ids, ids[0]], ["".join(ids[:2]), *ids[2:]]]
    assert len({fingerprint(names) for names in [ids, *others]}) == 5
    assert fingerprint(list(ids)) == fingerprint(ids)
