"""The DSpark drafter against a cache-free restatement of its maths, over several rounds of a paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.builtin import builtin_draft_path
from core.engine.batch import ChunkRows, RaggedBatch
from core.errors import ConfigError, ModelLoadError
from core.kvcache.storage import KVStorage
from core.layers.linear import vocab_argmax
from core.models.weights import load_target
from core.spec.drafts.base import CommittedRows, DraftOutput, DraftRequest
from core.spec.drafts.dspark import DSparkDrafter, load_dspark
from tests.dspark_oracle import MUTATIONS, Oracle
from tests.tiny import write_tiny_llama
from tests.tiny_draft import MAX_POSITIONS, TARGET, FakeTarget, load_tiny, write_tiny_dspark

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES_PER_SEQUENCE = MAX_POSITIONS // PAGE_SIZE


@dataclass
class Sequence:
    """What the engine would know of a sequence: its pages and how far it is committed."""

    pages: list[int]
    features: torch.Tensor  # [max positions, m * H]: the truth
    anchor: int
    length: int = 0  # p: exactly the positions below are published
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def slot(self, position: int) -> int:
        return self.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


class Engine:
    """Publishes and proposes for a few sequences and one padding sequence, as a captured step would."""

    def __init__(self, drafter: DSparkDrafter, num_sequences: int = 2) -> None:
        self.drafter = drafter
        num_pages = 1 + num_sequences * PAGES_PER_SEQUENCE
        self.storage = KVStorage(
            drafter.kv_layers, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
        )
        pages = np.random.default_rng(1).permutation(np.arange(1, num_pages)).tolist()
        random = torch.Generator().manual_seed(11)
        width = len(drafter.feature_layers) * TARGET["hidden_size"]
        self.sequences = [
            Sequence(
                pages=pages[index * PAGES_PER_SEQUENCE : (index + 1) * PAGES_PER_SEQUENCE],
                features=torch.randn(MAX_POSITIONS, width, generator=random),
                anchor=20 + index,
            )
            for index in range(num_sequences)
        ]

    def publish(self, counts: list[int], rows_per_sequence: int) -> None:
        """Commit counts[i] of rows_per_sequence rows of sequence i; the others go to the dummy page."""
        positions, slots, features = [], [], []
        for sequence, count in zip(self.sequences, counts, strict=True):
            for offset in range(rows_per_sequence):
                position = sequence.length + offset
                committed = offset < count
                positions.append(position)
                slots.append(sequence.slot(position) if committed else offset % PAGE_SIZE)
                features.append(sequence.features[position] * (1.0 if committed else -30.0))
            sequence.length += count
            sequence.anchor = int(sequence.random.integers(TARGET["vocab_size"]))
        # One padding row, as a bucket would have.
        rows = CommittedRows(
            features=torch.stack([*features, torch.zeros_like(features[0])]),
            hidden=torch.zeros(len(features) + 1, TARGET["hidden_size"]),
            next_token_ids=torch.zeros(len(features) + 1, dtype=torch.int64),
            positions=torch.tensor([*positions, 0]),
            slot_mapping=torch.tensor([*slots, 0]),
        )
        self.drafter.publish(rows, self.storage.layers)

    def request(self) -> DraftRequest:
        width = self.drafter.width
        block = range(width)
        return DraftRequest(
            anchor_ids=torch.tensor([s.anchor for s in self.sequences] + [0]),
            anchor_positions=torch.tensor([s.length for s in self.sequences] + [0]),
            page_table=torch.tensor([*(s.pages for s in self.sequences), [0] * PAGES_PER_SEQUENCE]),
            draft_slots=torch.tensor(
                [[s.slot(s.length + k) for k in block] for s in self.sequences]
                + [[k % PAGE_SIZE for k in block]]
            ),
        )

    def propose(self) -> DraftOutput:
        return self.drafter.propose(self.request(), self.storage.layers)

    def block_hidden(self) -> torch.Tensor:
        return self.drafter.block_hidden(self.request(), self.storage.layers)


def draft_and_oracle(path: Path, *, width: int = 5, **options: Any) -> tuple[DSparkDrafter, Oracle]:
    target = FakeTarget()
    write_tiny_dspark(path, TARGET, **options)
    oracle = Oracle.read(path, target.embedding, target.head)
    return load_tiny(path, target, width), oracle


def assert_matches(engine: Engine, oracle: Oracle) -> None:
    """Compare block hidden states, drafts and confidence of every real sequence."""
    width = engine.drafter.width
    hidden, output = engine.block_hidden(), engine.propose()
    assert output.token_ids.shape == output.confidence.shape == (len(engine.sequences) + 1, width)
    assert output.token_ids.dtype == torch.int64
    assert output.confidence.dtype == torch.float32
    assert hidden.isfinite().all()  # the padding sequence included
    for index, sequence in enumerate(engine.sequences):
        expected = oracle.block_hidden(sequence.features[: sequence.length], sequence.anchor, width)
        torch.testing.assert_close(hidden[index], expected, atol=2e-5, rtol=2e-5)
        tokens, logits = oracle.draft(expected, sequence.anchor)
        assert output.token_ids[index].tolist() == tokens
        if engine.drafter.has_confidence:
            torch.testing.assert_close(output.confidence[index], torch.sigmoid(logits), atol=1e-5, rtol=1e-5)


def run_rounds(engine: Engine, check: Callable[[], None]) -> None:
    """Prompts of 5 and 11 tokens in chunks of 4, then rounds that accept none, some and all drafts."""
    for counts in ([4, 4], [1, 4], [0, 3]):
        engine.publish(counts, rows_per_sequence=4)
    check()
    width = engine.drafter.width
    for accepted in ([0, width], [width // 2, 0], [width, width // 2], [0, 0]):
        engine.publish([count + 1 for count in accepted], rows_per_sequence=width + 1)
        check()


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("width", [1, 2, 5, 7])
def test_drafter_matches_the_oracle_round_after_round(tmp_path: Path, markov: str, width: int) -> None:
    drafter, oracle = draft_and_oracle(tmp_path, width=width, markov=markov, seed=width)
    engine = Engine(drafter)
    run_rounds(engine, lambda: assert_matches(engine, oracle))


@pytest.mark.parametrize(
    "options",
    [
        {"confidence_with_markov": False},
        {"markov_rank": 0, "confidence_with_markov": False},
        {"num_layers": 1, "target_layer_ids": (-1, 3)},
        {"confidence": False},
    ],
    ids=["confidence of hidden alone", "no Markov head", "embedding as feature", "no confidence head"],
)
def test_variants_of_the_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    drafter, oracle = draft_and_oracle(tmp_path, **options)
    assert drafter.has_confidence == options.get("confidence", True)
    engine = Engine(drafter)
    run_rounds(engine, lambda: assert_matches(engine, oracle))
    if not drafter.has_confidence:
        assert engine.propose().confidence.eq(1.0).all()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(tmp_path: Path, mutation: str) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    oracle.mutation = mutation
    engine = Engine(drafter)
    engine.publish([4, 4], rows_per_sequence=4)
    with pytest.raises(AssertionError):
        assert_matches(engine, oracle)


def test_proposing_twice_changes_nothing(tmp_path: Path) -> None:
    """The block's temporary rows must not become context."""
    drafter, oracle = draft_and_oracle(tmp_path)
    engine = Engine(drafter)
    engine.publish([4, 2], rows_per_sequence=4)
    first, second = engine.propose(), engine.propose()
    assert torch.equal(first.token_ids, second.token_ids)
    assert torch.equal(first.confidence, second.confidence)
    assert_matches(engine, oracle)


def test_anchor_without_any_context(tmp_path: Path) -> None:
    """A prompt of one token: the anchor stands at position 0 and sees only its block."""
    drafter, oracle = draft_and_oracle(tmp_path)
    assert_matches(Engine(drafter), oracle)


def test_last_block_reaches_past_the_longest_sequence(tmp_path: Path) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    engine = Engine(drafter)
    length = MAX_POSITIONS - drafter.width
    engine.publish([length, length - 1], rows_per_sequence=length)
    assert_matches(engine, oracle)


def test_no_value_is_read_back(tmp_path: Path) -> None:
    """Under fake tensors an op that needs a value on the host, or a shape from data, raises."""
    drafter, _ = draft_and_oracle(tmp_path, markov="rnn")
    engine = Engine(drafter)
    request = engine.request()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fields = ("anchor_ids", "anchor_positions", "page_table", "draft_slots")
        fake = DraftRequest(**{name: mode.from_tensor(getattr(request, name)) for name in fields})
        output = drafter.propose(fake, engine.storage.layers)
        engine.publish([1, 2], rows_per_sequence=4)
    assert output.token_ids.shape == (3, 5)


def test_features_are_the_outputs_of_the_named_layers(tmp_path: Path) -> None:
    """Layer id L means transformers' hidden_states[L + 1]; one off changes the drafts."""
    transformers = pytest.importorskip("transformers")
    path = write_tiny_llama(tmp_path / "target", num_hidden_layers=4)
    target = load_target(path, dtype=torch.float32, device=CPU)
    drafter = load_tiny(
        write_tiny_dspark(tmp_path / "draft", target.config, target_layer_ids=(-1, 0, 2)), target
    )
    ids = torch.randint(3, 320, (9,), generator=torch.Generator().manual_seed(2))
    storage = KVStorage(
        target.kv_layers + drafter.kv_layers,
        num_pages=5,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=CPU,
    )
    caches, draft_caches = storage.layers[: target.num_layers], storage.layers[target.num_layers :]
    pages = torch.tensor([2, 4, 1, 3])
    batch = whole_chunk(ids.tolist(), first=0, pages=pages)
    output = target.forward(batch, caches, feature_layers=drafter.feature_layers)
    rows = CommittedRows(
        features=output.features,
        hidden=output.hidden,
        next_token_ids=ids,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
    )
    drafter.publish(rows, draft_caches)
    request = DraftRequest(
        anchor_ids=torch.tensor([17]),
        anchor_positions=torch.tensor([9]),
        page_table=pages[None],
        draft_slots=slots_of(torch.arange(9, 14), pages)[None],
    )
    hidden = drafter.block_hidden(request, draft_caches)[0]

    reference = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        states = reference(ids[None], output_hidden_states=True).hidden_states
    oracle = Oracle.read(tmp_path / "draft", target.embed(torch.arange(320)), torch.empty(0))

    def expected(shift: int) -> torch.Tensor:
        features = torch.cat([states[max(layer + shift, 0)][0] for layer in (-1, 0, 2)], dim=-1)
        return oracle.block_hidden(features, 17, 5)

    torch.testing.assert_close(hidden, expected(1), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(hidden, expected(0), atol=1e-2)


def test_temperatures_scale_confidence_logits(tmp_path: Path) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    temperatures = [0.5, 2.0, 3.0, 1.0, 1.5, 9.0, 9.0]
    (tmp_path / "confidence_temperatures.json").write_text(json.dumps({"temperatures": temperatures}))
    scaled = Engine(load_tiny(tmp_path, FakeTarget()))
    scaled.publish([3, 4], rows_per_sequence=4)
    output = scaled.propose()
    sequence = scaled.sequences[0]
    _, logits = oracle.draft(oracle.block_hidden(sequence.features[:3], sequence.anchor, 5), sequence.anchor)
    expected = torch.sigmoid(logits / torch.tensor(temperatures[: drafter.width]))
    torch.testing.assert_close(output.confidence[0], expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_draft_stays_close_to_float32(tmp_path: Path) -> None:
    write_tiny_dspark(tmp_path, TARGET, dtype=torch.bfloat16)
    target = FakeTarget()
    exact = Engine(load_tiny(tmp_path, target))
    exact.publish([4, 3], rows_per_sequence=4)
    expected = exact.block_hidden()[:2]
    target.embedding, target.head = target.embedding.bfloat16(), target.head.bfloat16()
    drafter = load_dspark(
        tmp_path, target, width=5, dtype=torch.bfloat16, device=CPU, max_positions=MAX_POSITIONS
    )
    rough = Engine(drafter)
    rough.storage = KVStorage(
        drafter.kv_layers,
        num_pages=rough.storage.num_pages,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for sequence in rough.sequences:
        sequence.features = sequence.features.bfloat16()
    rough.publish([4, 3], rows_per_sequence=4)
    torch.testing.assert_close(rough.block_hidden()[:2].float(), expected, atol=0.15, rtol=0.1)
    assert rough.propose().confidence.dtype == torch.float32


def whole_chunk(ids: list[int], *, first: int, pages: torch.Tensor) -> RaggedBatch:
    """Rows `first` .. of a sequence as one chunk; everything before is in the cache."""
    positions = torch.arange(first, len(ids))
    return RaggedBatch(
        input_ids=torch.tensor(ids[first:]),
        positions=positions,
        slot_mapping=slots_of(positions, pages),
        decode=None,
        chunks=(ChunkRows(first_row=0, num_rows=len(ids) - first, start=first, pages=pages),),
    )


def slots_of(positions: torch.Tensor, pages: torch.Tensor, page_size: int = PAGE_SIZE) -> torch.Tensor:
    return pages[positions // page_size] * page_size + positions % page_size


def test_shipped_draft_is_accepted_by_the_builtin_target() -> None:
    """With real weights a mistake in features, positions or anchors shows as acceptance near 1."""
    builtin = pytest.importorskip("core.models.builtin")
    tokenizers = pytest.importorskip("tokenizers")
    try:
        target_path = builtin.ensure_builtin_model()
    except (ConfigError, ModelLoadError) as error:
        pytest.skip(f"the built-in target is not available here: {error}")
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_positions": 128}
    target = load_target(target_path, **options)
    drafter = load_dspark(builtin_draft_path(), target, width=7, **options)
    assert drafter.feature_layers == (1, 8, 15, 22, 28)
    tokenizer = tokenizers.Tokenizer.from_file(str(target_path / "tokenizer.json"))
    prompt = (
        "<|im_start|>user\nWrite a short story about a fox and a river.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    layers = target.kv_layers + drafter.kv_layers
    num_pages = 32
    storage = KVStorage(layers, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
    caches, draft_caches = storage.layers[: target.num_layers], storage.layers[target.num_layers :]
    pages = torch.arange(1, num_pages)
    published, emitted = 0, []
    drafts: list[int] = []
    for _ in range(20):
        batch = whole_chunk(ids + drafts, first=published, pages=pages)
        output = target.forward(batch, caches, feature_layers=drafter.feature_layers)
        choices = vocab_argmax(target.logits(output.hidden[len(ids) - 1 - published :])).tolist()
        accepted = next((k for k, draft in enumerate(drafts) if draft != choices[k]), len(drafts))
        ids = ids + drafts[:accepted] + [choices[accepted]]
        assert output.features is not None
        committed = len(ids) - 1 - published
        drafter.publish(
            CommittedRows(
                features=output.features[:committed],
                hidden=output.hidden[:committed],
                next_token_ids=torch.tensor(ids[published + 1 :]),
                positions=batch.positions[:committed],
                slot_mapping=batch.slot_mapping[:committed],
            ),
            draft_caches,
        )
        published += committed
        emitted.append(accepted + 1)
        request = DraftRequest(
            anchor_ids=torch.tensor(ids[-1:]),
            anchor_positions=torch.tensor([published]),
            page_table=pages[None],
            draft_slots=slots_of(torch.arange(published, published + 7), pages)[None],
        )
        proposal = drafter.propose(request, draft_caches)
        assert ((proposal.confidence > 0) & (proposal.confidence < 1)).all()
        drafts = proposal.token_ids[0].tolist()
    assert sum(emitted[1:]) / len(emitted[1:]) > 1.3
