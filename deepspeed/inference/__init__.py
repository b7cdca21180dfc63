"""Inference: engines of any module, paged generation, and serving. Names are imported on first use."""

from deepspeed._package import lazy

_LAZY = {
    "Client": "deepspeed.inference.deployments:Client",
    "Completion": "deepspeed.generate.llm:Completion",
    "DeepSpeedInferenceConfig": "deepspeed.config.inference:DeepSpeedInferenceConfig",
    "DeepSpeedTPConfig": "deepspeed.config.inference:RaggedTensorParallelConfig",
    "InferenceEngine": "deepspeed.inference.engine:InferenceEngine",
    "InferenceEngineV2": "deepspeed.inference.v2.engine_v2:InferenceEngineV2",
    "LLM": "deepspeed.generate.llm:LLM",
    "Pipeline": "deepspeed.inference.pipelines:Pipeline",
    "RaggedInferenceEngineConfig": "deepspeed.config.inference:RaggedInferenceEngineConfig",
    "Response": "deepspeed.inference.pipelines:Response",
    "SamplingParams": "deepspeed.generate.params:SamplingParams",
    "Token": "deepspeed.generate.llm:Token",
    "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_v2:build_engine_from_ds_checkpoint",
    "build_hf_engine": "deepspeed.inference.v2.engine_v2:build_hf_engine",
    "client": "deepspeed.inference.deployments:client",
    "pipeline": "deepspeed.inference.pipelines:pipeline",
    "serve": "deepspeed.inference.deployments:serve",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy(__name__, _LAZY)
