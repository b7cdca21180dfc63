"""A pipeline whose stages share sequences: the same numbers as one process with whole sequences."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, LayoutError, PipelineError, UsageError
from deepspeed.parallel.topology import PipelineParallelGrid, ProcessTopology
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.published import groups
from deepspeed.sequence.layer import DistributedAttention
from tests.harness import ranks, shared_ranks, store_path

pytestmark = pytest.mark.usefixtures("with_transformers")

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
VOCABULARY, LENGTH, COUNT = 23, 8, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
    "sequence_parallel_size": 2,
}


def llama(tie=False):
    import transformers as hf  # by the ranks that need it: it takes seconds

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=2, tie_word_embeddings=tie)
    return hf.LlamaForCausalLM(config)


def batches(kind="padded", count=COUNT):
    """Labels that lie on the second half of the sequence for the most part, with padding or several documents."""
    generator = torch.Generator().manual_seed(4)
    for number in range(count):
        tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[:, : LENGTH // 2 + number] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if kind == "padded":
            batch["attention_mask"] = torch.ones_like(tokens)
            batch["attention_mask"][0, -2 * number - 1 :] = 0
            labels[0, -2 * number - 1 :] = -100
        elif kind == "packed":
            batch["position_ids"] = torch.cat([torch.arange(3), torch.arange(LENGTH - 3)]).expand(2, -1).clone()
        yield batch


def trained(model, losses, steps=2):
    """What one process makes of it: the last loss, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(losses(model)) / COUNT
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return float(loss.detach()), model.state_dict()


def whole_losses(kind, model):
    return (model(**each, use_cache=False).loss for each in batches(kind))  # a cache hides documents from masks


def compare(engine, end):
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.allclose(param, end[name], atol=1e-6, rtol=0), name


@ranks(4, timeout=400)
def test_a_model_of_transformers():
    cases = [
        ("ulysses", 0, "1f1b", "padded", {}),
        ("ring", 1, "zb-h1", "plain", {}),
        ("ulysses", 3, "zbv", "packed", {}),
        ("ring", 3, "1f1b", "padded", {"activation_checkpoint_interval": 1}),
        ("auto", 2, "gpipe", "packed", {"activation_checkpoint_interval": 1, "use_reentrant": False}),
    ]
    for attention, stage, schedule, kind, pipeline in cases:
        tie = attention == "ring"
        losses = partial(whole_losses, kind)
        loss, end = trained(llama(tie), losses)
        module = PipelineModule(llama(tie), num_stages=2, partition_method="uniform", schedule=schedule)
        more = {
            "zero_optimization": {"stage": stage},
            "sequence_parallel": {"attention": attention},
            "pipeline": pipeline,
        }
        engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, **more})
        assert engine._parts.layout.sizes == {"pp": 2, "dp": 1, "sp": 2, "tp": 1}
        first = float(engine.eval_batch(batches(kind)))
        assert first == pytest.approx(float(sum(losses(llama(tie))) / COUNT), abs=1e-6)
        found = [float(engine.train_batch(batches(kind))) for _ in range(2)]
        assert found[0] == pytest.approx(first, abs=1e-6)
        assert found[1] == pytest.approx(loss, abs=1e-6), more
        compare(engine, end)
        if stage != 1:
            engine.destroy()
            continue
        engine.save_checkpoint(store_path(), tag="t")
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=4)
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **more, "sequence_parallel_size": 1})
        engine.load_checkpoint(store_path(), tag="t")
        compare(engine, end)
        engine.destroy()
    refuse_models()


def start(module, **more):
    return deepspeed.initialize(model=module, config={**CONFIG, **more})[0]


def refuse_models():
    with pytest.raises(DeepSpeedConfigError, match="2 ranks share sequences, and the PipelineModule is a model of"):
        start(PipelineModule(llama(), num_stages=2))
    with pytest.raises(UsageError, match="sees a part of a sequence"):
        start(PipelineModule(llama(), num_stages=2, loss_fn=loss_of_part), sequence_parallel={"attention": "ring"})
    engine = start(PipelineModule(llama(), num_stages=2), sequence_parallel={"attention": "ulysses"})
    odd = [{name: value[:, :5] for name, value in each.items()} for each in batches("plain")]
    with pytest.raises(PipelineError, match="a sequence of 5 tokens cannot be shared out over 2"):
        engine.train_batch(iter(odd))
    assert float(engine.train_batch(batches())) > 0
    engine.destroy()
    own = ({name: value + dist.get_rank() % 2 for name, value in each.items()} for each in batches("plain"))
    with pytest.raises(PipelineError, match="different ones"):
        start(PipelineModule(llama(), num_stages=2), sequence_parallel={"attention": "ulysses"}).train_batch(own)


def mpt():
    import transformers as hf

    torch.manual_seed(0)
    config = hf.MptConfig(d_model=16, n_heads=4, n_layers=2, max_seq_len=LENGTH, vocab_size=VOCABULARY)
    return hf.MptForCausalLM(config)


@shared_ranks(4, timeout=400)
def test_attention_that_a_model_computes_itself():
    module = PipelineModule(mpt(), num_stages=2, partition_method="uniform")
    with pytest.raises(UsageError, match=r"MptForCausalLM computes attention by itself .* sequence_parallel_size"):
        start(module, sequence_parallel={"attention": "ring"})


def gpt2():
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.1))


def of_all(axis, value):
    """What each rank of an axis has."""
    parts = [torch.empty_like(value) for _ in range(axis.size)]
    dist.all_gather(parts, value.contiguous(), group=axis.group)
    return parts


@ranks(4, timeout=400)
def test_ranks_drop_different_elements_of_their_parts():
    """With equal generators; the same ones again where a layer is recomputed, and on ranks that share a layer."""
    again = {"activation_checkpoint_interval": 1}
    cases = [
        (2, 1, "1f1b", again),
        (2, 1, "zb-h1", again),
        (2, 1, "zb-h1", {}),
        (1, 2, "1f1b", again | {"use_reentrant": False}),
    ]
    for stages, slices, schedule, pipeline in cases:
        module = PipelineModule(gpt2(), num_stages=stages, partition_method="uniform", schedule=schedule)
        split = {"tensor_parallel": {"autotp_size": slices}} if slices > 1 else {}
        engine = start(module, sequence_parallel={"attention": "ulysses"}, pipeline=pipeline, **split)
        layers = {name: each for name, each in module.named_modules() if isinstance(each, nn.Dropout)}
        seen = {name: [] for name in layers if name.endswith(("drop", "resid_dropout"))}
        for name, found in seen.items():
            layers[name].register_forward_hook(lambda _, args, out, found=found: found.append(out.detach()))
        layout = engine._parts.layout
        torch.manual_seed(5 + layout["pp"].rank)
        engine.train_batch(batches("plain"))
        assert any(seen.values()), "no dropout ran on this rank"
        for name, found in seen.items():
            if pipeline and name.endswith("resid_dropout"):  # each forward and its recomputation
                assert len(found) == 2 * COUNT, f"{name} ran {len(found)} times"
                pairs = sum(torch.equal(a, b) for at, a in enumerate(found) for b in found[at + 1 :])
                assert pairs == COUNT, f"{name} drops other elements when it is recomputed ({schedule})"
            for mine in found:
                parts = of_all(layout["sp"], mine == 0)
                assert not torch.equal(*parts), f"{name} drops the same elements of both parts ({schedule})"
                alike = of_all(layout["tp"], mine)
                assert all(torch.equal(mine, each) for each in alike), f"{name} differs between slices"
        states = of_all(layout["sp"], torch.get_rng_state())
        assert torch.equal(*states), "what ranks draw outside of the layers is not the same any more"
        engine.destroy()


class Block(nn.Module):
    """Attention over parts of sequences, or over whole ones without a group."""

    def __init__(self, group=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.shared = None if group is None else DistributedAttention(attention, group, gather_idx=1)

    def forward(self, x):
        parts = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
        seen = attention(*parts) if self.shared is None else self.shared(*parts, 0)
        return x + self.out(seen.flatten(2))


def attention(query, key, value):
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def layers(group=None):
    return [LayerSpec(nn.Embedding, VOCABULARY, 16), LayerSpec(Block, group), LayerSpec(Block, group),
            LayerSpec(nn.Linear, 16, VOCABULARY)]  # fmt: skip


def loss_of_part(logits, labels):
    """Worth what the part has of all labels; the engine averages over the ranks that share a sequence."""
    axis = groups._get_sequence_parallel_group()
    count = (labels != -100).sum().float()
    dist.all_reduce(count, group=axis)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * axis.size() / count


def parts(place):
    for batch in batches():
        yield tuple(batch[name].chunk(2, 1)[place] for name in ("input_ids", "labels"))


@shared_ranks(4, timeout=400)
def test_layers_with_an_attention_of_their_own():
    def losses(model):
        return (cross_entropy(model(b["input_ids"]).flatten(0, 1), b["labels"].flatten()) for b in batches())

    def seeded():
        made = []
        for number, spec in enumerate(layers()):
            torch.manual_seed(1234 + number)
            made.append(spec.build())
        return nn.Sequential(*made)

    loss, end = trained(seeded(), losses)
    options = {"loss_fn": loss_of_part, "seed_layers": True, "partition_method": "uniform"}
    topology = ProcessTopology(["pipe", "data", "sequence"], [2, 1, 2])
    for stage, schedule in ((0, "1f1b"), (1, "zbv"), (3, "zb-h1")):
        grid = PipelineParallelGrid(topology)
        group = grid.get_sequence_parallel_group()
        assert dist.get_process_group_ranks(group) == [0, 1] if dist.get_rank() < 2 else [2, 3]
        module = PipelineModule(layers(group), topology=topology, schedule=schedule, **options)
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=module, config=config)
        place = engine._parts.layout["sp"].rank
        assert place == dist.get_rank() % 2
        found = [float(engine.train_batch(parts(place))) for _ in range(2)]
        assert found[1] == pytest.approx(loss, abs=1e-6), stage
        compare(engine, end)
        engine.destroy()
        grid.close()
    refuse_layers()


def refuse_layers():
    row = PipelineModule(layers(), num_stages=2, loss_fn=loss_of_part)
    with pytest.raises(DeepSpeedConfigError, match="is 'ring', and the PipelineModule is made of"):
        start(row, sequence_parallel={"attention": "ring"})
    with pytest.raises(LayoutError, match="2 ranks hold each of the 2 stages, which sequence_parallel_size 4 does not"):
        start(PipelineModule(layers(), num_stages=2, loss_fn=loss_of_part), sequence_parallel_size=4)
    given = PipelineModule(layers(), topology=ProcessTopology(["pipe", "data"], [2, 2]), loss_fn=loss_of_part)
    with pytest.raises(DeepSpeedConfigError, match="topology of the PipelineModule has 1 along 'sequence'"):
        start(given)
