"""Makes `algorithm=dppo` a choice of verl's own Hydra configuration, without a file of verl being edited.

verl's `ppo_trainer.yaml` writes its `algorithm` node inline, so Hydra knows no group to choose from. A search-path
plugin therefore puts, in front of verl's own configuration folder, a source that serves the same `ppo_trainer.yaml`
with one more entry at the end of its defaults list: `- algorithm: null`. Everything else still comes from verl, and
without the choice the composed configuration is verl's to the byte. With `VERL_PLATFORM=cpu` the list also ends in
the settings that a machine without a GPU needs.
"""

import importlib.util
import os

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import ListConfig, OmegaConf, open_dict

OVERLAID = "ppo_trainer.yaml"


def added_defaults() -> list[dict[str, str | None]]:
    """Return what the overlay appends to verl's defaults list, in this process."""
    entries: list[dict[str, str | None]] = [{"algorithm": None}]
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        entries.insert(0, {"platform": "cpu"})
    return entries


def _groups(defaults: ListConfig) -> set[str]:
    """Return the groups named in a defaults list, without their `override`/`optional` keywords and packages."""
    names = (str(key) for entry in defaults if OmegaConf.is_dict(entry) for key in entry)
    return {name.split()[-1] for name in names}


class VerlConfigOverlay(FileConfigSource):
    """Serves verl's `ppo_trainer.yaml` with the added defaults; a no-op where verl has such a group itself."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme that names this source on Hydra's search path."""
        return "verl-dppo"

    def available(self) -> bool:
        """Return whether verl's configuration folder exists."""
        return os.path.isdir(self.path)

    def is_group(self, config_path: str) -> bool:
        """Return True for the root only: groups are verl's business."""
        return config_path in ("", None)

    def is_config(self, config_path: str) -> bool:
        """Return True for the one overlaid file."""
        return self._normalize_file_name(config_path) == OVERLAID and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> "list[str]":
        """List the one overlaid file."""
        if config_path or results_filter == ObjectType.GROUP:
            return []
        return [OVERLAID.removesuffix(".yaml")]

    def load_config(self, config_path: str) -> ConfigResult:
        """Load verl's file and append the added defaults that it lacks."""
        result = super().load_config(config_path)
        defaults = OmegaConf.select(result.config, "defaults")
        if isinstance(defaults, ListConfig):
            present = _groups(defaults)
            with open_dict(result.config):
                for entry in added_defaults():
                    if not present & set(entry):
                        defaults.append(entry)
        return result


def _verl_config_folder(search_path: ConfigSearchPath) -> str | None:
    """Return the folder of Hydra's main configuration if it is verl's own `verl/trainer/config`, else None."""
    for element in search_path.get_path():
        if element.provider != "main" or not element.path:
            continue
        path = element.path
        if path.startswith("pkg://"):
            if path.removeprefix("pkg://").replace("/", ".").strip(".") != "verl.trainer.config":
                return None
            spec = importlib.util.find_spec("verl.trainer.config")
            return None if spec is None else next(iter(spec.submodule_search_locations or []), None)
        path = path.removeprefix("file://")
        is_verls = "://" not in path and os.path.realpath(path).replace(os.sep, "/").endswith("verl/trainer/config")
        return path if is_verls else None
    return None


class VerlSearchPath(SearchPathPlugin):
    """Appends our groups to every search path, and overlays verl's main configuration where that is in use."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the two entries; called by Hydra before it composes a configuration."""
        search_path.append(provider="verl_dppo", path="pkg://verl_dppo.config")
        folder = _verl_config_folder(search_path)
        if folder:
            search_path.prepend(provider="verl_dppo_overlay", path=f"verl-dppo://{folder}", anchor="main")


def register() -> None:
    """Register both classes with Hydra; a second call changes nothing."""
    for plugin in (VerlConfigOverlay, VerlSearchPath):
        Plugins.instance().register(plugin)
