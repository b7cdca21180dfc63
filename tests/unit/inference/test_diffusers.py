"""A pipeline of the real Diffusers: the same object, and the same images."""

import pytest
import torch

import deepspeed
from deepspeed.transformers.replacement import replacement

diffusers = pytest.importorskip("diffusers", reason="pip install .[diffusion]")


def made():
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    blocks = {"block_out_channels": (4, 8), "norm_num_groups": 2}
    unet = diffusers.UNet2DConditionModel(
        **blocks,
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = diffusers.AutoencoderKL(**blocks, **kinds, latent_channels=4)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=64, max_position_embeddings=8))
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=text,
        tokenizer=None,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
def test_a_pipeline_gives_the_same_images():
    pipe, ids = made(), torch.arange(8)[None]

    def image():
        with torch.no_grad():
            words = pipe.text_encoder(ids)[0]
        options = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
        random = torch.Generator().manual_seed(0)
        return pipe(prompt_embeds=words, negative_prompt_embeds=-words, generator=random, **options).images

    before = image()
    given = deepspeed.init_inference(pipe, dtype="fp32", replace_with_kernel_inject=True, enable_cuda_graph=True)
    assert given is pipe
    assert any(replacement(each) is not None for part in (pipe.unet, pipe.text_encoder) for each in part.modules())
    torch.testing.assert_close(image(), before)
