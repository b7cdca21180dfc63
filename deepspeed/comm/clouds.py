"""Jobs of Azure ML, SageMaker and DLTS: how they are recognised and where they say that rank 0 is."""

from __future__ import annotations

import json
from collections.abc import Mapping

from deepspeed.comm.variables import problem

__all__ = ["aml_master", "in_aml", "in_aws_sm", "in_dlts", "sagemaker_master"]

AML_PORT = 6105  # several machines
AML_SINGLE_NODE_PORT = 54965


def in_aml(env: Mapping[str, str]) -> bool:
    """True in a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in env


def in_aws_sm(env: Mapping[str, str]) -> bool:
    """True in a job of Amazon SageMaker."""
    return "SM_TRAINING_ENV" in env


def in_dlts(env: Mapping[str, str]) -> bool:
    """True in a job of a DLTS cluster."""
    return "DLTS_JOB_ID" in env


def aml_master(env: Mapping[str, str], single_node: bool, port: int = AML_PORT) -> tuple[str, int]:
    """Address and port of rank 0 in an Azure ML job that was started by MPI."""
    if single_node:
        return env.get("AZ_BATCHAI_MPI_MASTER_NODE", "").strip() or "127.0.0.1", AML_SINGLE_NODE_PORT
    host = env.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0].strip()
    if not host:
        raise problem(
            env,
            ("AZUREML_EXPERIMENT_ID", "AZ_BATCH_MASTER_NODE", "MASTER_ADDR"),
            "an Azure ML job on several machines names its first one in AZ_BATCH_MASTER_NODE",
            "Set MASTER_ADDR to the host of rank 0 on every rank.",
        )
    return host, port


def sagemaker_master(env: Mapping[str, str]) -> str | None:
    """The first of SageMaker's hosts, if it lists them."""
    text = env.get("SM_HOSTS", "").strip()
    if not text:
        return None
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise problem(env, ("SM_HOSTS",), "a JSON list of host names is expected", "Set MASTER_ADDR on every rank.")
    return str(hosts[0])
