"""Write tests/golden/sampling: random logits and what transformers' processors make of them.

Temperature, then top-k, top-p and min-p, one row a setting. README.md names the environment it
runs in.
"""

import itertools
import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
FOLDER = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else GOLDEN) / "sampling"
VOCAB = 400
SPREADS = (0.5, 2.0, 8.0)  # from nearly flat to peaked
SETTINGS = itertools.product((0.6, 1.3), (0, 1, 50, 200, 1000), (0.0, 0.5, 0.95, 1.0), (0.0, 0.2))


def main():
    generator = torch.Generator().manual_seed(0)
    logits, settings, probabilities = [], [], []
    for i, (temperature, top_k, top_p, min_p) in enumerate(SETTINGS):
        row = torch.randn(1, VOCAB, generator=generator) * SPREADS[i % 3]
        if i % 5 == 0:
            row[torch.rand(1, VOCAB, generator=generator) < 0.5] = -torch.inf
        processors = [TemperatureLogitsWarper(temperature)]
        if top_k > 0:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(TopPLogitsWarper(top_p))
        if min_p > 0:
            processors.append(MinPLogitsWarper(min_p))
        scores = row
        for processor in processors:
            scores = processor(None, scores)
        logits.append(row[0])
        settings.append([temperature, top_k, top_p, min_p])
        probabilities.append(torch.softmax(scores.double(), dim=-1)[0].float())
    FOLDER.mkdir(parents=True, exist_ok=True)
    tensors = {
        "logits": torch.stack(logits),
        "settings": torch.tensor(settings),
        "probabilities": torch.stack(probabilities),
    }
    save_file(tensors, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
