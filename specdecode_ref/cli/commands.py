"""The commands and their options, as Typer reads them; each hands over to a file of its own.

Nothing heavy is imported before a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from specdecode_ref import __version__
from specdecode_ref.cli import screen
from specdecode_ref.errors import InputError, ModelError

app = typer.Typer(
    help="Speculative decoding you can read, watch and trust.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
trace_app = typer.Typer(help="Check a trace file, or count what is in it.")
app.add_typer(trace_app, name="trace")

WHAT, HOW, LAW, OUTPUT = "Model and prompt", "Speculation", "Sampling", "Output"

Model = Annotated[
    str, typer.Option("--model", help="smollm2, a folder, a .gguf file, or org/name.", rich_help_panel=WHAT)
]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", help="The model that the drafter 'model' uses.", rich_help_panel=HOW)
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float64.", rich_help_panel=WHAT)]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.", rich_help_panel=WHAT)]
Verifier = Annotated[
    str,
    typer.Option(
        "--verifier",
        help="auto, match, chain, tree, block, traversal, kseq or onehot; lossy: typical, relaxed, lenient.",
        rich_help_panel=HOW,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option("--gamma", help="Tokens to draft in a chain. (default: the drafter's own)", rich_help_panel=HOW),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="chain:4, sampled:3,2,1, static:wide, dynamic:4,3,5, optimal:12 or auto. (default: the drafter's own)",
        rich_help_panel=HOW,
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="FOLDER",
        help="A trained head or draft model for eagle, medusa, model or hybrid. (default: the one shipped)",
        rich_help_panel=HOW,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="auto, torch or triton: who plays the rounds. auto: the kernels on a CUDA device, where they can.",
        rich_help_panel=HOW,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 is greedy; 1 is the model as it is.", rich_help_panel=LAW)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens that hold this much mass.", rich_help_panel=LAW)
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=LAW)]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", help="Where to end at the latest.", rich_help_panel=OUTPUT)
]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Speculative decoding you can read, watch and trust."""
    if version:
        print(f"specdecode-ref {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to say to the model; - reads it from standard input.")
    ],
    model: Model = "smollm2",
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            help="auto, none, ngram, model, early-exit, medusa, eagle, hybrid, or several: ngram+model.",
            rich_help_panel=HOW,
        ),
    ] = "auto",
    draft_model: DraftModel = None,
    head: Head = None,
    verifier: Verifier = "auto",
    gamma: Gamma = None,
    tree: Tree = None,
    backend: Backend = "auto",
    temperature: Temperature = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=LAW)
    ] = 0,
    top_p: TopP = 1.0,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Keep tokens with this share of the likeliest one's.", rich_help_panel=LAW),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: against all tokens so far.", rich_help_panel=LAW)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Against tokens of the output.", rich_help_panel=LAW)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, once for each time.", rich_help_panel=LAW)
    ] = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this string; may be given again.", rich_help_panel=OUTPUT),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.", rich_help_panel=WHAT)
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Record every round in a file.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
    ] = False,
) -> int:
    """Generate text, each token marked by where it came from.

    On a terminal, accepted drafts are green and underlined, residual tokens bold, bonus tokens reversed.
    A pipe or a file gets the text alone.
    Ctrl-C ends after the round in progress, with exit code 130.
    """
    from specdecode_ref.cli import generate as command

    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    return command.run(
        command.Request(
            prompt=prompt,
            model=model,
            drafter=drafter,
            draft_model=draft_model,
            verifier=verifier,
            gamma=gamma,
            head=head,
            tree=tree,
            backend=backend,
            sampling=sampling,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop or ()),
            raw=raw,
            dtype=dtype,
            device=device,
            trace=trace,
            json=as_json,
        )
    )


@app.command()
def bench(
    prompts: Annotated[
        list[str], typer.Option("--prompts", metavar="FILE", help="JSONL with id, category, turns; may be given again.")
    ],
    drafters: Annotated[
        str, typer.Option("--drafters", help="Our methods, with commas between; name@tree gives one its own tree.")
    ] = "none,auto",
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            help="Others, with commas: hf (transformers), hf-pld (its prompt lookup), hf-assisted (our draft model).",
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", help="So many prompts, spread over the categories. (default: all)")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of every prompt; each counts by its median.")] = 1,
    model: Model = "smollm2",
    draft_model: DraftModel = None,
    head: Head = None,
    gamma: Gamma = None,
    tree: Tree = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write every figure there.", rich_help_panel=OUTPUT)
    ] = None,
) -> int:
    """Measure methods side by side: same weights, dtype and prompts, taking turns within one run."""
    from specdecode_ref.cli import bench as command

    names = re.split(r",(?! *(?:\d|with))", drafters)  # a comma before a number, or before "with", belongs to a tree
    return command.run(
        command.Request(
            prompts=tuple(prompts),
            drafters=tuple(name.strip() for name in names if name.strip()),
            peers=tuple(name.strip() for name in peers.split(",") if name.strip()),
            limit=limit,
            repeats=repeats,
            model=model,
            draft_model=draft_model,
            head=head,
            gamma=gamma,
            tree=tree,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            json=json_file,
        )
    )


@app.command()
def train(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="draft, medusa or eagle.")],
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="Where the head, its card and checkpoints go.")],
    model: Model = "smollm2",
    text: Annotated[
        str | None, typer.Option("--text", metavar="FOLDER", help="Where the target's text goes. (default: OUT/text)")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Text that the target writes, where it is missing.")] = 400000,
    epochs: Annotated[int, typer.Option("--epochs", help="How often all of it is read.")] = 6,
    words: Annotated[int, typer.Option("--words", help="Tokens that the draft can guess.")] = 12288,
    depths: Annotated[int, typer.Option("--depths", help="Guesses in a row to train EAGLE for; Medusa's heads.")] = 4,
    layers: Annotated[int | None, typer.Option("--layers", help="Transformer layers. (default: 1; draft: 3)")] = None,
    intermediate: Annotated[
        int | None,
        typer.Option("--intermediate", help="Width of feed-forward blocks. (default: 1536; draft: 1280)"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="The highest learning rate. (default: 0.002; Medusa's 0.001)")
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Train a draft for a target, on text that the target writes itself.

    An interrupted run goes on where it was when the same command is given again.
    """
    from specdecode_ref.cli import train as command

    return command.run(
        command.Request(
            kind=kind,
            out=out,
            text=text,
            model=model,
            settings={
                "tokens": tokens,
                "epochs": epochs,
                "words": words,
                "depths": depths,
                "layers": layers,
                "intermediate": intermediate,
                "rate": rate,
                "seed": seed,
            },
            dtype=dtype,
            device=device,
        )
    )


@trace_app.command()
def validate(file: Annotated[str, typer.Argument(metavar="FILE")]) -> int:
    """Check a trace against its format and its invariants; exit code 2 names the first line that is wrong."""
    from specdecode_ref.trace_file import read_trace

    trace = read_trace(file)
    print(
        f"{screen.one_line(file)}: valid {trace.header.schema}, level {trace.header.level}, {len(trace.rounds)} rounds"
    )
    return 0


@trace_app.command()
def stats(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    names: Annotated[bool, typer.Option("--names", help="Say what vLLM, SGLang and llama.cpp call each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Count what a trace holds: every figure with its definition."""
    from specdecode_ref.cli import show

    return show.stats(file, names, as_json)


@app.command()
def models() -> int:
    """List the models that can be loaded here without a network, and where they came from."""
    from specdecode_ref.cli import show

    return show.models()


@app.command("app")
def visualiser(
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="(default: 8501)")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Open no browser.")] = False,
) -> int:
    """Open the visualiser in a browser."""
    from importlib.util import find_spec

    if find_spec("streamlit") is None:
        raise ModelError("the package streamlit for the visualiser", "none", "pip install 'specdecode-ref[app]'")
    if find_spec("specdecode_app") is None:
        raise InputError("the package specdecode_app", "none", "install specdecode-ref as a whole")
    from importlib import import_module

    code: int = import_module("specdecode_app.launch").run(port=port, headless=headless)
    return code
