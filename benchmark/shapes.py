"""Problem sizes: those of large heads on a GPU, small ones on a CPU."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """N tokens, hidden size H, vocabulary V."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.vocabulary}"

    @property
    def length(self) -> int:
        """Tokens of a sequence: 512, or fewer so that there are at least four sequences."""
        return min(512, self.tokens // 4)

    @property
    def sequences(self) -> int:
        return self.tokens // self.length


def parse(text: str) -> Shape:
    """A shape from "NxHxV"; ValueError says what was expected."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise ValueError(f"a shape is written NxHxV, as in 8192x4096x131072; got {text!r}")
    shape = Shape(*(int(number) for number in match.groups()))
    if shape.tokens < 16 or shape.tokens % (4 * shape.length):
        raise ValueError(
            f"N must be at least 16 and a multiple of 4, past 2048 of 2048; got {shape.tokens}"
        )
    return shape


MAIN = {
    # Heads of Llama 3 8B with a rounded vocabulary, Qwen3 1.7B, Qwen2.5 7B and Llama 3 70B.
    "cuda": (
        Shape(8192, 4096, 131_072),
        Shape(32_768, 2048, 151_936),
        Shape(16_384, 3584, 152_064),
        Shape(4096, 8192, 128_256),
    ),
    # A matrix product of 1 GFLOP: three dozen calls of everything in a minute.
    "cpu": (Shape(512, 128, 8192),),
}
SMALL_TOKENS = {
    "cuda": (
        *(Shape(tokens, 4096, 32_000) for tokens in (256, 512, 1152, 2048)),
        *(Shape(tokens, 4096, 131_072) for tokens in (256, 512, 1152, 2048)),
        Shape(256, 1024, 32_000),
    ),
    "cpu": (Shape(32, 128, 8192), Shape(128, 128, 8192)),
}
HOST = {"cuda": (Shape(256, 1024, 32_000),), "cpu": (Shape(32, 128, 8192),)}
"""Where the host takes longer than the GPU."""
TOKENS = {
    "cuda": tuple(Shape(tokens, 2048, 131_072) for tokens in (2048, 4096, 8192, 16_384, 32_768)),
    "cpu": tuple(Shape(tokens, 64, 16_384) for tokens in (128, 256, 512, 1024)),
}
VOCABULARY = {
    "cuda": tuple(
        Shape(8192, 2048, vocabulary) for vocabulary in (16_384, 32_768, 65_536, 131_072, 262_144)
    ),
    "cpu": tuple(Shape(256, 64, vocabulary) for vocabulary in (8192, 16_384, 32_768, 65_536)),
}
LOGITS = {"cuda": (Shape(8192, 4096, 131_072),), "cpu": (Shape(256, 64, 16_384),)}
