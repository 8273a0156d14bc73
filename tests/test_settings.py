import dataclasses

import pytest
from omegaconf import OmegaConf

import verl_dppo.config
from verl_dppo.settings import BalanceSettings, DPPOSettings, PackingSettings, RefusedSettingError


def completion(**values):
    return DPPOSettings.from_mapping({"completion": values})


def prompt(**values):
    return DPPOSettings.from_mapping({"prompt": values})


def packing(**values):
    return DPPOSettings.from_mapping({"packing": values})


def balance(**values):
    return DPPOSettings.from_mapping({"balance": values})


def test_dppo_yaml_holds_every_setting_with_its_default_and_a_comment():
    path = f"{next(iter(verl_dppo.config.__path__))}/algorithm/dppo.yaml"
    node = OmegaConf.to_container(OmegaConf.load(path).algorithm.dppo)
    assert DPPOSettings.from_mapping(node) == DPPOSettings()
    assert dataclasses.asdict(DPPOSettings()) == node
    with open(path) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines):
        key = line.strip()
        if ":" in key and not key.startswith("#") and not key.endswith(":"):
            assert lines[number - 1].strip().startswith("#") or lines[number - 1].endswith(":"), f"no comment: {line}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": 0}, r"completion\.keep=0 is refused.*give a share in \(0, 1\]"),
        ({"keep": 1.2}, r"completion\.keep=1\.2 is refused"),
        ({"keep": "most"}, r"completion\.keep='most' is refused: no such choice.*or auto"),
        ({"keep": [0.5]}, r"completion\.keep=\[0\.5\] is refused: it is not a number"),
        ({"keep": float("nan")}, r"completion\.keep=nan is refused"),
        ({"rule": "threshold", "rate": 1}, r"completion\.rate=1 is refused.*no weight repairs.*\[0, 1\)"),
        ({"rule": "threshold", "rate": -0.1}, r"completion\.rate=-0\.1 is refused"),
        ({"rule": "threshold", "keep": 0.3}, r"completion\.keep=0\.3 is refused: rule=threshold does not use it"),
        ({"rule": "threshold", "floor": 0.3}, r"completion\.floor=0\.3 is refused: rule=threshold does not use it"),
        ({"rate": 0.5}, r"completion\.rate=0\.5 is refused: rule=neyman does not use it.*rule=threshold"),
        ({"keep": 0.6, "floor": 0.7}, r"completion\.floor=0\.7 is refused.*keep=0\.6"),
        ({"floor": 0.3}, r"completion\.floor=0\.3 is refused.*0\.2, the smallest keep of auto"),
        ({"floor": 0}, r"completion\.floor=0 is refused"),
        ({"design": "systematic"}, r"completion\.design=systematic is refused: no such choice.*pivotal"),
        ({"rule": "top_k"}, r"completion\.rule=top_k is refused.*neyman, threshold"),
        ({"enable": "yes"}, r"completion\.enable='yes' is refused"),
        ({"probe_every": 0}, r"completion\.probe_every=0 is refused.*null for none"),
        ({"probe_every": 2.5}, r"completion\.probe_every=2\.5 is refused: it is not an integer"),
        ({"kep": 0.5}, r"completion\.kep=0\.5 is refused: no such setting.*keep"),
    ],
)
def test_a_bad_completion_setting_is_refused_with_its_name_value_and_way_out(values, message):
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        completion(**values)
    assert "Way out:" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": 1}, r"prompt\.enable=1 is refused: it is neither true nor false.*give one of the two"),
        ({"rule": "neyman"}, r"prompt\.rule=neyman is refused: no such choice.*beta, threshold"),
        ({"schedule": "grow"}, r"prompt\.schedule=grow is refused: no such choice.*refill, shrink"),
        ({"keep": 0}, r"prompt\.keep=0 is refused.*give a share in \(0, 1\].*prompt\.enable=false"),
        ({"keep": 1.2}, r"prompt\.keep=1\.2 is refused"),
        ({"keep": "most"}, r"prompt\.keep='most' is refused: no such choice.*or auto"),
        ({"keep": True}, r"prompt\.keep=True is refused: it is not a number"),
        ({"keep": float("nan")}, r"prompt\.keep=nan is refused"),
        ({"floor": 0}, r"prompt\.floor=0 is refused: a prompt below it could never be sampled.*\(0, keep=0\.9\]"),
        ({"floor": -0.1}, r"prompt\.floor=-0\.1 is refused"),
        ({"floor": None}, r"prompt\.floor=None is refused: it is not a number"),
        ({"keep": 0.4, "floor": 0.5}, r"prompt\.floor=0\.5 is refused.*\(0, keep=0\.4\]"),
        ({"keep": "auto", "floor": 0.6}, r"prompt\.floor=0\.6 is refused.*0\.5, the smallest keep of auto"),
        ({"warmup_visits": 0}, r"prompt\.warmup_visits=0 is refused: nothing is known.*an integer >= 1"),
        ({"warmup_visits": 1.5}, r"prompt\.warmup_visits=1\.5 is refused: it is not an integer"),
        ({"forgetting": -0.1}, r"prompt\.forgetting=-0\.1 is refused: a weight outside \[0, 1\].*give 0 to remember"),
        ({"forgetting": 1.1}, r"prompt\.forgetting=1\.1 is refused"),
        ({"forgetting": "half"}, r"prompt\.forgetting='half' is refused: it is not a number"),
        ({"id_column": ""}, r"prompt\.id_column='' is refused: it names no column.*or null"),
        ({"id_column": 3}, r"prompt\.id_column=3 is refused: it names no column"),
        ({"flor": 0.5}, r"prompt\.flor=0\.5 is refused: no such setting.*floor"),
    ],
)
def test_a_bad_prompt_setting_is_refused_with_its_name_value_and_way_out(values, message):
    with pytest.raises(RefusedSettingError, match=r"^algorithm\.dppo\." + message) as refusal:
        prompt(**values)
    assert "Way out:" in str(refusal.value)


def test_a_group_of_settings_that_is_none_is_refused():
    for name in ("completion", "prompt", "packing", "balance"):
        with pytest.raises(RefusedSettingError, match=rf"algorithm\.dppo\.{name}=0\.5 is refused: it is not a group"):
            DPPOSettings.from_mapping({name: 0.5})


def test_the_ends_of_every_range_of_a_prompt_setting_are_let_through():
    assert prompt(keep=1, floor=1, forgetting=0).prompt.keep == 1
    assert prompt(keep="auto", floor=0.5, forgetting=1).prompt.floor == 0.5
    assert prompt(keep=0.2, floor=0.2, warmup_visits=3, id_column="extra_info.index").prompt.warmup_visits == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": "false"}, r"packing\.enable='false' is refused: it is neither true nor false.*give one of the two"),
        ({"enable": 1}, r"packing\.enable=1 is refused"),
        ({"enable": None}, r"packing\.enable=None is refused"),
        ({"window": 0}, r"packing\.window=0 is refused: nothing would fit.*an integer >= 1, or null"),
        ({"window": -8}, r"packing\.window=-8 is refused"),
        ({"window": 8.0}, r"packing\.window=8\.0 is refused: it is not an integer"),
        ({"window": float("nan")}, r"packing\.window=nan is refused: it is not an integer"),
        ({"window": True}, r"packing\.window=True is refused: it is not an integer"),
        ({"window": "all"}, r"packing\.window='all' is refused: it is not an integer"),
        ({"micro_batch_tokens": 0}, r"packing\.micro_batch_tokens=0 is refused: nothing would fit.*or null"),
        ({"micro_batch_tokens": -1}, r"packing\.micro_batch_tokens=-1 is refused"),
        ({"micro_batch_tokens": 1e4}, r"packing\.micro_batch_tokens=10000\.0 is refused: it is not an integer"),
        ({"micro_batch_tokens": False}, r"packing\.micro_batch_tokens=False is refused: it is not an integer"),
        ({"micro_batch_tokens": [8192]}, r"packing\.micro_batch_tokens=\[8192\] is refused: it is not an integer"),
        ({"enable": False, "window": 8}, r"packing\.window=8 is refused: nothing is packed.*packing\.enable=true"),
        (
            {"enable": False, "micro_batch_tokens": 8192},
            r"packing\.micro_batch_tokens=8192 is refused: nothing is packed",
        ),
        (
            {"capacity": 8192},
            r"packing\.capacity=8192 is refused: no such setting.*are enable, micro_batch_tokens, window",
        ),
    ],
)
def test_a_bad_packing_setting_is_refused_with_its_name_value_and_way_out(values, message):
    with pytest.raises(RefusedSettingError, match=r"^algorithm\.dppo\." + message) as refusal:
        packing(**values)
    assert "Way out:" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": "true"}, r"balance\.enable='true' is refused: it is neither true nor false.*give one of the two"),
        ({"enable": 0}, r"balance\.enable=0 is refused"),
        ({"cost": "seconds"}, r"balance\.cost=seconds is refused: no such choice.*use one of auto, flops, tokens"),
        ({"cost": None}, r"balance\.cost=None is refused: no such choice"),
        ({"cost": 2}, r"balance\.cost=2 is refused: no such choice"),
        ({"equal_count": True}, r"balance\.equal_count=True is refused: no such setting.*are cost, enable"),
    ],
)
def test_a_bad_balance_setting_is_refused_with_its_name_value_and_way_out(values, message):
    with pytest.raises(RefusedSettingError, match=r"^algorithm\.dppo\." + message) as refusal:
        balance(**values)
    assert "Way out:" in str(refusal.value)


def test_the_ends_of_every_range_of_packing_and_balance_are_let_through():
    assert packing(window=1, micro_batch_tokens=1).packing == PackingSettings(window=1, micro_batch_tokens=1)
    assert packing(enable=False, window=None, micro_batch_tokens=None).packing == PackingSettings(enable=False)
    assert balance(enable=False, cost="tokens").balance == BalanceSettings(enable=False, cost="tokens")


def test_what_is_not_built_is_refused():
    with pytest.raises(
        RefusedSettingError, match=r"algorithm\.dppo\.preset=paper is refused: not built yet.*rule=thre"
    ):
        DPPOSettings.from_mapping({"preset": "paper"})


def test_a_bad_seed_is_refused():
    for seed in (-1, 0.5, "x", True):
        with pytest.raises(RefusedSettingError, match=r"algorithm\.dppo\.seed"):
            DPPOSettings.from_mapping({"seed": seed})


def test_lowest_pi_of_each_rule():
    assert completion().completion.lowest_pi(0.4) == pytest.approx(0.1)
    assert completion(floor=0.2).completion.lowest_pi(0.6) == pytest.approx(0.2)
    assert completion(rule="threshold").completion.lowest_pi(0.6) == pytest.approx(0.5)
    assert completion(rule="threshold", rate=0.9).completion.lowest_pi(0.6) == pytest.approx(0.1)


def test_full_batches_come_last_and_in_the_share_that_was_asked_for():
    def annealed(fraction, total):
        settings = DPPOSettings(anneal_fraction=fraction)
        return [step for step in range(1, total + 1) if settings.anneals(step, total)]

    assert annealed(0.0, 10) == []
    assert annealed(0.25, 8) == [7, 8]
    assert annealed(1.0, 3) == [1, 2, 3]
    for bad in (-0.1, 1.1, "x", float("nan")):
        with pytest.raises(RefusedSettingError, match=r"algorithm\.dppo\.anneal_fraction"):
            DPPOSettings(anneal_fraction=bad)


def test_each_level_has_its_switch_and_both_have_one():
    def prunes(**values):
        settings = DPPOSettings.from_mapping(values)
        return settings.prunes_completions, settings.prunes_prompts, settings.prunes

    off = {"enable": False}
    assert prunes() == (True, True, True)
    assert prunes(completion=off) == (False, True, True)
    assert prunes(prompt=off) == (True, False, True)
    assert prunes(completion=off, prompt=off) == (False, False, False)
    assert prunes(enable=False) == (False, False, False)


def test_rows_are_ordered_unless_both_packing_and_balance_are_off_or_all_is():
    def orders(**values):
        return DPPOSettings.from_mapping(values).orders

    off = {"enable": False}
    assert orders()
    assert orders(packing=off)
    assert orders(balance=off)
    assert orders(completion=off, prompt=off), "any GRPO run can have it"
    assert not orders(packing=off, balance=off)
    assert not orders(enable=False)
