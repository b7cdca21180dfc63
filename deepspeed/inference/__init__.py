"""Inference: engines of any module, paged generation, and serving. Names are imported on first use."""

from deepspeed._package import lazy

_LAZY = {
    "Client": "deepspeed.inference.deployments:Client",
    "Completion": "deepspeed.generate.llm:Completion",
    "DeepSpeedInferenceConfig": "deepspeed.config.inference:DeepSpeedInferenceConfig",
    "InferenceEngine": "deepspeed.inference.engine:InferenceEngine",
    "LLM": "deepspeed.generate.llm:LLM",
    "Pipeline": "deepspeed.inference.pipelines:Pipeline",
    "RaggedInferenceEngineConfig": "deepspeed.config.inference:RaggedInferenceEngineConfig",
    "Response": "deepspeed.inference.pipelines:Response",
    "SamplingParams": "deepspeed.generate.params:SamplingParams",
    "Token": "deepspeed.generate.llm:Token",
    "client": "deepspeed.inference.deployments:client",
    "pipeline": "deepspeed.inference.pipelines:pipeline",
    "serve": "deepspeed.inference.deployments:serve",
}

__getattr__ = lazy(__name__, _LAZY)
