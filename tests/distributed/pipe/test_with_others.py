"""A pipeline together with split layers and with experts, and what it is refused together with."""

from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, LayoutError, UsageError
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.tensor_parallel import splits_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import ranks, store_path

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_allow_untested_optimizer": True,
}


class First(nn.Module):
    """Experts that hand on their output alone."""

    def __init__(self, ep_size):
        super().__init__()
        self.inner = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=ep_size, capacity_factor=4.0, min_capacity=0)

    def forward(self, x):
        return x + self.inner(x)[0]


def experts(ep_size):
    torch.manual_seed(3)
    return First(ep_size)


def row(*layers):
    return PipelineModule(
        list(layers), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True
    )


def samples(replica, count=2):
    generator = torch.Generator().manual_seed(replica)
    return iter([tuple(torch.rand(2, 8, generator=generator) for _ in range(2)) for _ in range(count)])


@ranks(4)
def test_experts_are_spread_over_the_replicas_of_their_stage():
    """As the same experts that every replica has, at the stages that split gradients and states."""

    def train(ep_size, stage):
        module = row(*(experts(ep_size) for _ in range(2)))
        engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, "zero_optimization": {"stage": stage}})
        replica = module.mpu().get_data_parallel_rank()
        losses = [float(engine.train_batch(samples(replica))) for _ in range(3)]
        return losses, engine

    expected, engine = train(1, 0)
    own = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    for stage in (0, 2):
        losses, engine = train(2, stage)
        assert losses == pytest.approx(expected, abs=1e-6)
        for name, param in engine.module.named_parameters():
            assert torch.allclose(param, own[engine._parts.name_of(name)], atol=1e-6), name
        with pytest.raises(DeepSpeedError, match="experts in a pipeline"):
            engine.save_checkpoint(f"{store_path()}-experts")
        whole = engine.zero3_consolidated_16bit_state_dict()
        if deepspeed.comm.get_rank() == 0:
            assert {name.partition(".")[0] for name in whole} == {"0", "1"}
            assert sum("deepspeed_experts.1." in name for name in whole) == 4
        engine.destroy()
    with pytest.raises(UsageError, match="rank 0 has experts over 2 ranks, that of rank 2 over no"):
        deepspeed.initialize(model=row(experts(2), nn.Linear(8, 8)), config=CONFIG)


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def llama(tie):
    import transformers as hf  # by the ranks that need it: it takes seconds

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, vocab_size=23, num_hidden_layers=2, tie_word_embeddings=tie))


def tokens(count=2):
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        batch = torch.randint(23, (2, 5), generator=generator)
        yield {"input_ids": batch, "labels": batch}


def whole_weights(engine):
    axis, splits, found = engine._parts.layout["tp"], splits_of(engine.module), {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            parts = [None] * axis.size
            torch.distributed.all_gather_object(parts, param.detach().clone(), group=axis.group)
        found[name] = splits[name].join(parts) if name in splits else parts[0]
    return found


def compare(found, end):
    for name, value in found.items():
        assert torch.allclose(value, end[name], atol=2e-6), name


@ranks(4)
def test_layers_of_a_stage_are_split():
    for stage, tie in ((1, True), (3, False)):
        whole = llama(tie)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        expected = [float(sum(whole(**batch).loss for batch in tokens()) / 2)]
        (sum(whole(**batch).loss for batch in tokens()) / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
        end = whole.state_dict()
        module = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        split = {"autotp_size": 2}
        more = {"tensor_parallel": split, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, **more})
        assert engine._parts.layout.sizes == {"pp": 2, "dp": 1, "sp": 1, "tp": 2}
        assert any("q_proj" in name for name in splits_of(module))
        assert [float(engine.train_batch(tokens()))] == pytest.approx(expected, abs=2e-6)
        compare(whole_weights(engine), end)
        engine.save_checkpoint(f"{store_path()}-{stage}", tag="t")
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **more})
        path = Path(f"{store_path()}-{stage}")
        engine.load_checkpoint(str(path), tag="t")
        compare(whole_weights(engine), end)
        engine.destroy()
        if deepspeed.comm.get_rank() == 0:
            compare(get_fp32_state_dict_from_zero_checkpoint(str(path), "t"), end)
            convert(path / "t", path / "universal")
        deepspeed.comm.barrier()
        again = PipelineModule(llama(tie), num_stages=4)
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, "zero_optimization": {"stage": stage}})
        for tag in ("t", "universal"):
            engine.load_checkpoint(str(path), tag=tag)
            compare(whole_weights(engine), end)
        engine.save_checkpoint(str(path), tag="four")
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **more})
        for tag in ("four", "universal"):
            engine.load_checkpoint(str(path), tag=tag)
            compare(whole_weights(engine), end)
        engine.destroy()


@ranks(2)
def test_what_does_not_go_together():
    def start(module, **more):
        deepspeed.initialize(model=module, config={**CONFIG, **more})

    plain = row(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel_size is 2, and the model is a PipelineModule"):
        start(plain, sequence_parallel_size=2)
    with pytest.raises(LayoutError, match=r"1 ranks hold each of the 2 stages, which .*autotp_size 2 does not divide"):
        start(plain, tensor_parallel={"autotp_size": 2})
