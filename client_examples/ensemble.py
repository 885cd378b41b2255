"""Streams an answer from the ensemble (tokenizer, engine, detokenizer): the same tensors under another model name."""

from common import ExampleError, parser, run, stream_text


def main() -> None:
    arguments = parser(__doc__, model="paged_ensemble").parse_args()
    pieces = 0
    for piece in stream_text(arguments):
        print(piece, end="", flush=True)
        pieces += 1
    print()
    if not pieces:
        raise ExampleError("the answer was empty")


if __name__ == "__main__":
    run(main)
