"""`AutoTP`: splits the blocks of a model by the names of the layers whose outputs are summed, as scripts ask for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.parallel.regions import Members, Peers
from deepspeed.tensor_parallel.apply import apply, sum_gradient
from deepspeed.tensor_parallel.build import find_rules
from deepspeed.tensor_parallel.draws import draw_apart
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.model_init import set_autotp_mode
from deepspeed.tensor_parallel.modules.linear import LinearAllreduce, LinearLayer
from deepspeed.tensor_parallel.plan import plan, require_split
from deepspeed.tensor_parallel.rule_objects import AutoTPConfig
from deepspeed.tensor_parallel.rules import Kind, Rule, Rules, of_spec
from deepspeed.tensor_parallel.shard_sizes import AutoTPMeta, get_shard_size

__all__ = ["AutoTP", "move"]

_COUNTS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    *("embed_dim", "hidden_size", "split_size", "all_head_size"),
)


def move(tensor: Tensor, device: Any, copy: bool = True) -> Tensor:
    """The tensor on a device; with `copy` in memory of its own."""
    return tensor.to(device, copy=copy) if not tensor.is_meta else torch.empty_like(tensor, device=device)


class AutoTP:
    """Splits `module` over the ranks that `set_tensor_parallel_config` names; `replace` does it.

    `all_reduce_linears` are names of layers inside a block whose inputs are split; its other linear layers are split by
    outputs. `orig_layer_impl` is the class of these blocks, None for those of any list. `partition_config` takes the
    place of all that. Weights are those of the module: a `state_dict` and other classes of layers are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        all_reduce_linears: Sequence[str],
        prefix: str,
        state_dict: Any,
        linear_layer_setting: Any,
        orig_layer_impl: Any,
        keep_module_on_host: bool = False,
        partition_config: AutoTPConfig | None = None,
        vocab_parallel_lm_head: bool = False,
        model_config: Any = None,
        tp_grain_size: int = 1,
        training_mode: bool = False,
    ) -> None:
        if state_dict is not None or prefix:
            raise UsageError(
                "AutoTP: a state_dict to load while layers are split is not taken; load it before, or give a folder of "
                "safetensors to tp_model_init(checkpoint=...)"
            )
        if keep_module_on_host or (linear_layer_setting is not None and linear_layer_setting[0] is not nn.Linear):
            raise UsageError(
                "AutoTP: keep_module_on_host, and layers other than torch's Linear in linear_layer_setting, are not "
                "taken. Leave them out"
            )
        if training_mode:
            set_autotp_mode(True)
        self.block: type[nn.Module] | None = orig_layer_impl
        self.module, self.all_reduce_linears = module, tuple(all_reduce_linears or ())
        self.partition_config = partition_config
        self.split_head, self.grain = vocab_parallel_lm_head or None, tp_grain_size
        config = getattr(module, "config", None) if model_config is None else model_config
        self.tp_meta = AutoTPMeta.from_model_config(config, tp_grain_size)
        self.linear_policies: dict[type[nn.Module], type[nn.Module]] | None = None
        self.mp_size = 1
        self.mp_group: ProcessGroup | None = None

    # ---- what names tell of a model

    @staticmethod
    def in_module_list(module: nn.Module, module_list: Sequence[nn.Module]) -> bool:
        """Whether a block of the same class is there."""
        return any(type(each) is type(module) for each in module_list)

    @staticmethod
    def get_module_list(model: nn.Module) -> list[nn.Module]:
        """The first block of each class, of the lists of blocks in the model."""
        found: list[nn.Module] = []
        for module in model.modules():
            for block in module if isinstance(module, nn.ModuleList) else ():
                if not AutoTP.in_module_list(block, found):
                    found.append(block)
        return found

    @staticmethod
    def get_layers(parent: str, module: nn.Module) -> list[str]:
        """Paths of the linear layers in a block, and "ln" for each norm."""
        found = []
        for path, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                found.append(path)
            elif type(layer).__name__.endswith("Norm"):
                found.append("ln")
        return found

    @staticmethod
    def update_policy_list(
        policy_list: list[tuple[type[nn.Module], list[str]]], new_module: nn.Module, new_gems: list[str]
    ) -> list[tuple[type[nn.Module], list[str]]]:
        """The list with one more class of blocks; names of a class that is there are put together."""
        for place, (kind, gems) in enumerate(policy_list):
            if kind is type(new_module):
                policy_list[place] = kind, [*gems, *(name for name in new_gems if name not in gems)]
                return policy_list
        return [*policy_list, (type(new_module), new_gems)]

    @staticmethod
    def kernel_supported(module_list: Sequence[nn.Module]) -> bool:
        """Whether kernels take the place of these blocks: never, models run as they are."""
        return False

    @staticmethod
    def supported(model: nn.Module) -> bool:
        """Whether the model's own plan or the names of its layers say how to split it."""
        return any(rows for _, rows in _policies(model))

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """For each class of blocks the paths of the layers whose outputs are summed over ranks."""
        found = [(kind, rows) for kind, rows in _policies(model) if rows]
        if not found:
            raise UsageError(
                f"AutoTP: neither a plan nor the names of its layers tell how {type(model).__name__} is to be split. "
                "Give rules in tensor_parallel.partition_config.layer_specs"
            )
        return found

    # ---- a model is split

    def set_tensor_parallel_config(self, mp_size: int, mp_group: ProcessGroup | None) -> None:
        """Which ranks share the layers."""
        if (1 if mp_group is None else mp_group.size()) != mp_size:
            raise UsageError(f"AutoTP: mp_size is {mp_size}, but mp_group is {mp_group!r}; let them agree")
        self.mp_size, self.mp_group = mp_size, mp_group

    def update_linear_policies(self) -> None:
        """Say by which published class a kind of layers would be split by a script itself."""
        self.linear_policies = {nn.Linear: LinearLayer}
        if self.partition_config is None and self.all_reduce_linears:
            self.linear_policies[LinearLayer] = LinearAllreduce

    def update_mp_params(self, child: nn.Module, name: str | None = None) -> None:
        """Let a module's own counts of heads and widths be those of this rank."""
        for attribute in _COUNTS:
            value = vars(child).get(attribute)
            if isinstance(value, int) and not isinstance(value, bool):
                rank = 0 if self.mp_group is None else self.mp_group.rank()
                setattr(child, attribute, get_shard_size(value, self.mp_size, self.tp_meta, attribute, rank))

    def register_replicated_grad_hooks(self, model: nn.Module) -> None:
        """Sum the gradients of parameters that are whole and used inside of split regions, by the rules."""
        if self.mp_size > 1:
            peers = self._peers()
            for path, module in model.named_modules():
                rule = self._rules().find(path, None)
                if rule is not None and rule.kind is Kind.WHOLE_INSIDE and share_of(module) is None:
                    for param in module.parameters(recurse=False):
                        sum_gradient(param, peers)

    def replace(self) -> nn.Module:
        """Split the module; its layers keep their objects and their parameters' identity."""
        if self.mp_size == 1:
            return self.module
        made = plan(self.module, self._rules(), self.mp_size, grain=self.grain, split_head=self.split_head)
        require_split(made, type(self.module).__name__)
        apply(made, self._peers(), lambda _: nullcontext())
        draw_apart(self.module, self._peers())
        return self.module

    def _replace_module(self, r_module: nn.Module, prev_name: str = "", prev_class_name: str = "") -> nn.Module:
        """As DeepSpeed's scripts call it, with the module that the constructor was given."""
        if r_module is not self.module:
            raise UsageError("AutoTP: _replace_module splits the module that AutoTP was made with, not another one")
        return self.replace()

    def _peers(self) -> Peers:
        assert self.mp_group is not None, "several ranks have a group"
        return Members(self.mp_group)

    def _blocks(self) -> list[nn.Module]:
        lists = [block for each in self.module.modules() if isinstance(each, nn.ModuleList) for block in each]
        return lists if self.block is None else [each for each in self.module.modules() if isinstance(each, self.block)]

    def _rules(self) -> Rules:
        own = self.partition_config
        if own is not None:
            rules = [rule for spec in own.layer_specs for rule in of_spec(spec._checked(), "partition_config")]
            return Rules(tuple(rules), own.strict_mode, tuple(own.lm_head_patterns))
        if not self.all_reduce_linears:
            return find_rules(TPTrainingConfig(), self.module)
        sums = "|".join(re.escape(name) for name in self.all_reduce_linears)
        row = Rule(re.compile(rf"(?:.*\.)?({sums})\.weight$"), Kind.ROW, source="all_reduce_linears", known=True)
        inside = {id(layer) for block in self._blocks() for layer in block.modules()}
        linear = [
            path for path, layer in self.module.named_modules() if isinstance(layer, nn.Linear) and id(layer) in inside
        ]
        others = "|".join(re.escape(path) for path in linear) or "$^"
        column = Rule(re.compile(rf"({others})\.weight$"), Kind.COLUMN, source="all_reduce_linears", known=True)
        return Rules((row, column))


def _policies(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
    rules, kind = find_rules(TPTrainingConfig(), model), getattr(getattr(model, "config", None), "model_type", None)
    paths = {id(module): path for path, module in model.named_modules()}
    found = []
    for block in AutoTP.get_module_list(model):
        rows = []
        for inner, layer in block.named_modules():
            rule = rules.find(paths[id(layer)], kind) if isinstance(layer, nn.Linear) else None
            if rule is not None and rule.kind is Kind.ROW:
                rows.append(inner)
        found.append((type(block), rows))
    return found
