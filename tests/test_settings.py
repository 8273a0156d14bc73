import dataclasses

import pytest
from omegaconf import OmegaConf

import verl_dppo.config
from verl_dppo.settings import DPPOSettings, RefusedSettingError


def completion(**values):
    return DPPOSettings.from_mapping({"completion": values})


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


@pytest.mark.parametrize("name", ["prompt", "packing", "balance", "preset"])
def test_what_is_not_built_is_refused(name):
    with pytest.raises(RefusedSettingError, match=rf"algorithm\.dppo\.{name}=.*not built yet"):
        DPPOSettings.from_mapping({name: {"enable": True}})


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


def test_each_switch_alone_leaves_stock_verl():
    assert not DPPOSettings.from_mapping({"enable": False}).prunes_completions
    assert not completion(enable=False).prunes_completions
    assert DPPOSettings().prunes_completions
