"""Serves a LLaMA through OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions.

python -m agentic_ring.serve --model FOLDER --max-context 65536
"""

from pathlib import Path
from typing import Annotated, Literal

from agentic_ring.data.text.chat import TEMPLATES
from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.inference.named_model import NamedModel
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import make_mesh
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BODY_BYTES, BODY_BYTES_A_TOKEN = 2 * 2**20, 32
"""Default size limit of a request: at least the first, and the second for each token of the context."""


def main(
    model: Path,
    adapter: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    name: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_context: Annotated[int | None, cli.optional_flag(metavar="TOKENS")] = None,
    allow_extrapolation: Annotated[bool, cli.switch] = False,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, cli.optional_flag()] = None,
    batch_size: int = 8,
    queue_size: int = 16,
    max_body: Annotated[int | None, cli.optional_flag(metavar="BYTES")] = None,
) -> None:
    """Serves a model until it is interrupted.

    Args:
      model: Folder in Hugging Face's layout with its tokenizer.json, GGUF file, or name of a model.
      adapter: LoRA adapter of the model: its folder.
      name: Name by which requests select the model. Default: that of the folder, the file or the model, and
        of the adapter.
      template: Chat template: vicuna_v1.1, llama-3, plain, or tokenizer for the model's own one.
        Default: the one that the adapter was trained with, or the model's own, if it has one.
      host: Address to listen on. Everyone who can reach it can use the server: there is no API key.
      port: Port to listen on; 0 selects a free one.
      max_context: Maximum number of tokens of a prompt and its answer together. Default: the context
        that the model was made for.
      allow_extrapolation: Allow a max_context above the context that the model was made for.
      dtype: Data type of weights and computation. Default: as stored.
      batch_size: Maximum number of requests that continue the same text and are answered together; 1 answers
        one at a time.
      queue_size: Requests that may wait while others are answered; further ones are refused (status 429).
      max_body: Maximum size of a request in bytes. Default: 32 for each token of the context, at least
        2 MiB.
    """
    if template is not None and template not in TEMPLATES:
        raise UnknownNameError("chat template", template, TEMPLATES)
    limits = {"batch-size": (batch_size, 1), "queue-size": (queue_size, 0), "max-body": (max_body, 1)}
    for flag, (value, least) in limits.items():
        if value is not None and value < least:
            raise ConfigError(f"--{flag} is {value}; give at least {least}")
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port is {port}; give one of 0 to 65535")
    with needs_extra("serve"):
        import uvicorn

        from agentic_ring.serve.app import ModelServer
        from agentic_ring.serve.generation import TextGenerator
        from agentic_ring.serve.load_limits import LimitedConnection
        from agentic_ring.serve.prompts import PromptProcess

    found = NamedModel.find(model, adapter)
    name, context = name or found.name, found.context(max_context, allow_extrapolation)
    tokenizer = found.tokenizer()
    template = template or found.template(tokenizer)
    with PromptProcess(found.path, template, context, tokenizer.longest_token) as prompts:
        prompts.check_template()
        mesh = make_mesh()
        engine = TextEngine(found.load(mesh, dtype, context), mesh)
        generator = TextGenerator(engine, tokenizer, context, batch_size)
        if host not in LOOPBACK:
            say(f"warning: {host} may be reachable from other machines, and the server requires no API key")
        say(f"serving {name}, at most {context} tokens{'' if template else ', no chats: it has no template'}")
        max_body = max_body or max(BODY_BYTES, BODY_BYTES_A_TOKEN * context)
        app = ModelServer(name, generator, prompts, queue_size, max_body)
        settings = {"http": LimitedConnection, "ws": "none", "timeout_graceful_shutdown": 5}
        uvicorn.run(app, host=host, port=port, access_log=False, **settings)


if __name__ == "__main__":
    cli.run(main, prog="python -m agentic_ring.serve", description=__doc__)
