"""Ask a server by the client of OpenAI: a completion, then the same as a stream, then several at once.

python examples/serve/model.py --output served-model
ds_serve served-model --port 8000
python examples/serve/ask.py --address http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI

PROMPT = "def __init__(self"
GIVEN: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0.5}


async def at_once(address: str, key: str, model: str, count: int) -> list[int]:
    """Tokens of many completions, each with a seed of its own."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key=key) as client:
        asked = [client.completions.create(model=model, seed=seed, **GIVEN) for seed in range(count)]
        return [answer.usage.completion_tokens if answer.usage else 0 for answer in await asyncio.gather(*asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--key", default="none", help="a key of the server's --api-key-file")
    parser.add_argument("--count", type=int, default=16, help="requests at once")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.address}/v1", api_key=args.key)
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, seed=0, **GIVEN)
    print(f"{model} continues {PROMPT!r}:\n{answer.choices[0].text}\n")

    print("the same as a stream:")
    stream = client.completions.create(model=model, seed=0, stream=True, **GIVEN)
    streamed = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    print("equal" if streamed == answer.choices[0].text else f"different: {streamed}")

    counts = asyncio.run(at_once(args.address, args.key, model, args.count))
    print(f"{args.count} requests at once: {sum(counts)} tokens")


if __name__ == "__main__":
    main()
