"""The commands that need no ranks: describe, prepare, convert and check; each imports its dependencies when it runs."""

import logging
import sys
from io import StringIO
from pathlib import Path

from shardwright.command import show
from shardwright.display.columns import line_width
from shardwright.io import BadInput, read_document, write_document
from shardwright.models.adapter_config import read_adapter
from shardwright.models.alike import has_images, read_config, read_configuration, without_format
from shardwright.models.config_keys import without_notes
from shardwright.models.description import USUAL_TOKENS, model_of_config, stated_length
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt
from shardwright.models.mtp import DEPTHS_KEY, with_mtp
from shardwright.models.registry import FAMILIES, TRACED_TOWERS
from shardwright.types import Model, Plan
from shardwright_train.data.corpora import Source
from shardwright_train.data.split import LossOn
from shardwright_train.models.support import check_supported, without_devices
from shardwright_train.options import CheckOptions, ConvertOptions, DescribeOptions, PrepareOptions
from shardwright_train.start import without_collection


def describe(options: DescribeOptions) -> None:
    """Write the description of a model."""
    frozen = tuple(map(FrozenPart.parse, options.frozen))
    model = describe_folder(options.config_dir, options.name, options.sequence_length, options.lora, options.taken_as)
    further = model.config.get(DEPTHS_KEY)
    if further and not options.mtp:
        note = f"{DEPTHS_KEY} {further}: layers that predict further tokens are left out (--mtp {further} adds them)"
        print(f"{options.config_dir / 'config.json'}: {note}", file=sys.stderr, flush=True)
    model = with_mtp(model, options.mtp)
    write_document(options.out, freeze(model, frozen) if frozen else model)


def prepare_text(options: PrepareOptions) -> None:
    """Write a tokenizer and the tokens of a text, or images as arrays."""
    if (prepare_others := _OTHERS.get(options.source)) is not None:
        if options.loss_on is LossOn.COMPLETIONS:
            raise BadInput("--loss-on completions", f"does not apply to {options.source}", "leave it out")
        prepare_others(options)
        return
    if options.image_size is not None:
        raise BadInput("--image-size", "applies only to images", "leave it out, or pass --source images")
    if options.mel_bins is not None:
        raise BadInput("--mel-bins", "applies only to speech", "leave it out, or pass --source speech")
    from shardwright_train.data.prepare import How, prepare

    named = options.source, options.field, options.dataset_split
    how = How(*named, options.tokenizer_mib, options.workers, options.loss_on)
    prepare(options.text, options.glob, options.vocab_size, options.max_mib, options.out, options.tokenizer, how)


def _prepare_images(options: PrepareOptions) -> None:
    from shardwright_train.data.media import prepare_images

    of_text = {"--vocab-size": options.vocab_size, "--tokenizer": options.tokenizer, "--max-mib": options.max_mib}
    for option in (option for option, value in of_text.items() if value is not None):
        raise BadInput(option, "images have no tokens", "leave it out")
    if options.image_size is None:
        raise BadInput("--image-size", "is missing", "pass the model's image_size, in pixels")
    prepare_images(Path(options.text), options.image_size, options.out, options.workers)


def _prepare_captions(options: PrepareOptions) -> None:
    from shardwright_train.data.media import Tokens, prepare_captions

    if options.image_size is None:
        raise BadInput("--image-size", "is missing", "pass the model's image_size, in pixels")
    tokens = Tokens(options.tokenizer, options.vocab_size)
    prepare_captions(Path(options.text), options.image_size, options.out, tokens, options.workers)


def _prepare_speech(options: PrepareOptions) -> None:
    with without_collection():
        from shardwright_train.data.media import Tokens, prepare_speech

    if options.mel_bins is None:
        raise BadInput("--mel-bins", "is missing", "pass the model's num_mel_bins")
    tokens = Tokens(options.tokenizer, options.vocab_size)
    prepare_speech(Path(options.text), options.mel_bins, options.seconds, options.out, tokens, options.workers)


_OTHERS = {Source.IMAGES: _prepare_images, Source.CAPTIONS: _prepare_captions, Source.SPEECH: _prepare_speech}
"""Functions that prepare data other than plain text."""


def convert(options: ConvertOptions) -> None:
    """Write the model of a checkpoint as a folder in Hugging Face's format."""
    with without_collection():
        from shardwright_train.weights.export import export
    export(options)


def check(options: CheckOptions) -> None:
    """Print memory and traffic of every role of a plan; raise NothingFits if a rank has too little memory."""
    from rich.console import Console

    from shardwright_train.dry_run import check_roles, print_checks, raise_if_too_large
    from shardwright_train.models.base import family_of

    plan = read_document(options.plan, Plan)
    check_supported(plan, options.plan)
    family = family_of(plan.model, options.plan)
    if options.reset_attention_mask and not family.learns(plan.model).keeps_boundaries:
        raise BadInput("--reset-attention-mask", "samples of this family have no documents", "leave it out")

    def progress(done: int, total: int) -> None:
        print(f"simulated {done} of {total} roles", file=sys.stderr, flush=True)

    shares = () if options.data is None else _document_shares(plan, options.data, options.reset_attention_mask)
    runnable, attention = without_devices(plan, family.plain_kernel)
    checks = check_roles(runnable, family, attention, progress, options.reset_attention_mask)
    printed = StringIO()
    is_terminal = sys.stdout.isatty()
    console = Console(file=printed, force_terminal=is_terminal, width=line_width(), highlight=False, markup=False)
    print_checks(plan, checks, console)
    show("\n".join([printed.getvalue().removesuffix("\n"), *shares]))
    raise_if_too_large(plan, checks)


def _document_shares(plan: Plan, data: Path, separates: bool) -> tuple[str, ...]:
    """Return a line for each cp_size of a plan: how uneven documents make the attention of its ranks."""
    from shardwright_train.data.document_pairs import document_warnings
    from shardwright_train.data.split import Boundaries
    from shardwright_train.models.base import family_of

    if not separates:
        raise BadInput("--data", "a sample's documents see one another without --reset-attention-mask", "pass both")
    objective = family_of(plan.model, plan.name).trained_on(plan.model, None)
    return document_warnings(plan, objective.open(data, 0, boundaries=Boundaries(reset_attention_mask=True)))


# The description of a model, from its config.json.


def describe_folder(
    folder: Path, name: str, sequence_length: int | None, adapter: Path | None = None, taken_as: str | None = None
) -> Model:
    """Describe the model of a folder's config.json for samples of a length in tokens, including positions of images.

    `sequence_length` None: 4096 or the model's number of positions if that is smaller; a message says which.
    `adapter`: peft's adapter_config.json, or its folder: low-rank matrices are trained instead of the model.
    `taken_as`: the family whose model is described instead of a model of an unknown type.
    Raises BadInput naming the key that cannot be trained, and why.
    """
    file = folder / "config.json"
    given = read_configuration(file)
    with without_collection():
        from shardwright_train.models.base import describe, family_named
        from shardwright_train.models.gemma3n import GEMMA3N, describe_gemma3n
        from shardwright_train.models.traced import describe_by_trace, is_traced

    # Errors take one line here. Importing transformers sets its log level, so this comes after it.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        if taken_as is None and is_traced(given) and not has_images(given):
            config, notes = without_format(given)
            length = sequence_length or stated_length(config)
            if length is None:
                raise BadInput("--sequence-length", f"{file} does not state the sample length", "give it, in tokens")
            ignored = None
            if config["model_type"] == GEMMA3N:
                model, assumed = describe_gemma3n(config, name, length)
                notes = (*notes, *assumed, f"its plans are not trained here: {TRACED_TOWERS[GEMMA3N]}")
            else:
                model = describe_by_trace(config, name, length)
        else:
            read = read_config(given, file, taken_as)
            facts, notes = FAMILIES[read.config["model_type"]], read.notes
            config, ignored = without_notes(facts, read.config)
            if facts.untrained is None:
                model = describe(family_named(facts.model_type, file), config, name, sequence_length)
            else:
                model = model_of_config(config, name, sequence_length, file)
                notes = (*notes, f"its plans are not trained here: {facts.untrained}")
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None
    if sequence_length is None:
        most = f"at most {USUAL_TOKENS} and the model's"
        notes = (*notes, f"tokens of a sample: {model.sequence_length}, {most} (--sequence-length)")
    for note in (*notes, ignored):
        if note is not None:
            print(f"{file}: {note}", file=sys.stderr, flush=True)
    return model if adapter is None else adapt(model, *read_adapter(adapter))
