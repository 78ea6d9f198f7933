"""The recipes of torchtitan's config registries: what each sets, and the model that it is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from api.frameworks.configurations.documents import known_keys


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function of torchtitan's config registries: its name, the module, and the values that it sets."""

    name: str
    module: str
    values: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """Return sizes of the model, as in `Reading`."""
        names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        return {key: (int(self.values[key]), f"--config {self.name}") for key in names if key in self.values}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of torchtitan 0.3 by name."""
    result = {}
    for line in sorted(known_keys("torchtitan_recipes")):
        name, *pairs = line.split(" ")
        values = dict(pair.split("=", 1) for pair in pairs)
        result[name] = Recipe(name, values.pop("module"), values)
    return result


def recipe_of(model: str) -> Recipe | None:
    """Return the recipe of a model by its name, such as "meta-llama/Llama-3.1-8B"; None: torchtitan has none."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower().rpartition("/")[2])
    name = re.sub(r"_(instruct|base|hf)$", "", re.sub(r"^(meta_)?llama_?3_([13]_)?", "llama3_", name))
    return recipes().get({"deepseek_v3": "deepseek_v3_671b"}.get(name, name))
