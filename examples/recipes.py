"""Published settings by name: what --recipe puts in front of a command line.

All are of gTop-k S-SGD: Shi et al. 2019, arXiv 1901.04359, Section IV; where the paper leaves a
setting open, it is that of the experiments released with it, github.com/hclhkbu/gtopkssgd. There
the learning rate rises to base-lr from base-lr / P and is not multiplied by P, density and learning
rate warm up together, and from given epochs on the rate is a tenth of what it was.

In none of them as published: k entries are picked of each bucket, not of the whole model (a large
--bucket-mb makes it one bucket); the entries that the published tree loses at inner merges are
owed; images or words that do not fill a batch on every worker are left out of an epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PUBLISHED_WARMUP = "0.25,0.0625,0.015625,0.004"


@dataclass(frozen=True)
class Recipe:
    """The beginning of a command line.

    Attributes:
        name: as --recipe takes it.
        script: which example it is for.
        source: paper and section.
        flags: each with its value, both as on a command line.
        data: what it trains on, and where that comes from.
        different: what is not as published in this one alone; empty if nothing is known.
    """

    name: str
    script: str
    source: str
    flags: Mapping[str, str]
    data: str
    different: str = ""

    @property
    def words(self) -> list[str]:
        """The flags as arguments."""
        return [word for pair in self.flags.items() for word in pair]


@dataclass(frozen=True)
class UsedRecipe:
    """A recipe in a run, and those of its flags that were given other values (flag: value)."""

    recipe: Recipe
    overridden: Mapping[str, str]

    def __str__(self) -> str:
        """Several lines, for the log."""
        recipe, overridden = self.recipe, self.overridden
        kept = [f"{flag} {value}" for flag, value in recipe.flags.items() if flag not in overridden]
        given = [f"{flag} {value}, not {recipe.flags[flag]}" for flag, value in overridden.items()]
        lines = [
            f"recipe {recipe.name} ({recipe.source})",
            f"sets {' '.join(kept) or 'nothing'}",
            f"overridden: {'; '.join(given) or 'nothing'}",
            f"made for {recipe.data}",
        ]
        if recipe.different:
            lines.append(f"not as published: {recipe.different}")
        return "\n  ".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            "name": self.recipe.name,
            "source": self.recipe.source,
            "flags": dict(self.recipe.flags),
            "overridden": dict(self.overridden),
        }


def use(recipe: Recipe, arguments: Sequence[str]) -> UsedRecipe:
    """The recipe in front of a command line that a parser without abbreviations has accepted."""
    overridden = {}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, joined, value = word.partition("=")
        if flag in recipe.flags:
            overridden[flag] = value if joined else following
    changed = {flag: value for flag, value in overridden.items() if value != recipe.flags[flag]}
    return UsedRecipe(recipe, MappingProxyType(changed))


def names(script: str) -> list[str]:
    """The recipes of one example."""
    return [name for name, recipe in RECIPES.items() if recipe.script == script]


IMAGES, LANGUAGE = "train_resnet50.py", "train_lstm.py"
GTOPK = "gTop-k S-SGD, arXiv 1901.04359, Section IV, and the settings released with it"

SPARSE = {"--compressor": "gtopk", "--density": "0.001", "--density-warmup": PUBLISHED_WARMUP}
ON_CIFAR10 = {
    "--dataset": "cifar10",
    "--batch-size": "32",  # 128 is published, too
    "--epochs": "141",
    "--base-lr": "0.1",
    "--lr-scaling": "none",
    "--warmup-epochs": "10",
    "--lr-steps": "81,122,155",  # the last one counts with more --epochs
    "--momentum": "0.9",
    "--wd": "1e-4",
    **SPARSE,
}
ON_IMAGENET = {
    "--dataset": "imagefolder",
    "--epochs": "95",
    "--base-lr": "0.01",
    "--lr-scaling": "none",
    "--warmup-epochs": "10",
    "--lr-steps": "30,60,80",
    "--momentum": "0.9",
    "--wd": "5e-4",
    **SPARSE,
}
CIFAR10 = "CIFAR-10: cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html"
IMAGENET = "ImageNet (ILSVRC 2012 of https://image-net.org), one sub-folder of images per class"
PTB = "the Penn Treebank, of https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"

ALL = (
    Recipe(
        "resnet20-cifar10",
        IMAGES,
        GTOPK,
        {"--model": "resnet20", **ON_CIFAR10},
        CIFAR10,
    ),
    # The form for small images: one linear layer behind the convolutions, not three.
    Recipe(
        "vgg16-cifar10",
        IMAGES,
        GTOPK,
        {"--model": "vgg16-cifar", **ON_CIFAR10},
        CIFAR10,
    ),
    Recipe(
        "alexnet-imagenet",
        IMAGES,
        GTOPK,
        {"--model": "alexnet", "--batch-size": "256", **ON_IMAGENET},
        IMAGENET,
        "images for validation are scaled to 256 pixels before the middle is cut out",
    ),
    Recipe(
        "resnet50-imagenet",
        IMAGES,
        GTOPK,
        {"--model": "resnet50", "--batch-size": "64", **ON_IMAGENET},
        IMAGENET,
        "images for validation are scaled to 256 pixels before the middle is cut out; the "
        "last batch norm of every block starts at zero",
    ),
    # The published rate falls first at epoch 63, and so stays in these 50.
    Recipe(
        "lstm-ptb",
        LANGUAGE,
        GTOPK,
        {
            "--size": "large",
            "--dropout": "0.65",
            "--tokenizer": "words",
            "--vocabulary": "10000",
            "--batch-size": "20",
            "--bptt": "35",
            "--epochs": "50",
            "--base-lr": "1.0",
            "--lr-decay": "1",
            "--clip": "0.25",
            "--momentum": "0",
            "--wd": "0",
            **SPARSE,
        },
        PTB,
        "a worker's text is contiguous, and its state that of the words before; published is text "
        "in pieces that are dealt out to the workers",
    ),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in ALL})
