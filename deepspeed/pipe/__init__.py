"""Pipeline parallelism: layers spread over ranks, micro-batches that follow each other through them.

```
specs       a layer that is built where it is needed;  partition: which layers make a stage;  ties: shared weights
module      PipelineModule: the layers of this rank
schedule/   which rank computes what when: data, without torch
forms       what travels between stages, as text and tensors;  wires: the messages
split       backward in two parts;  executor: plays a schedule
feed        micro-batches;  accord: what ranks agree upon around a batch
engine      PipelineEngine: train_batch, eval_batch;  measure: the norm over stages
```
"""

from __future__ import annotations

from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
