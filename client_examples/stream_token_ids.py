"""Sends token ids over gRPC and prints the ids of the answer as they arrive: no text on either side.

The default prompt asks for the capital of France, with chat markup, in the demo model's vocabulary.
"""

import json
from contextlib import closing

from common import ExampleError, Request, parser, run, sampling_parameters

PROMPT_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def main() -> None:
    arguments_parser = parser(__doc__, prompt=None)
    arguments_parser.add_argument(
        "input_ids",
        nargs="*",
        type=int,
        default=PROMPT_IDS,
        metavar="TOKEN_ID",
        help="default: a question for the demo model",
    )
    arguments = arguments_parser.parse_args()
    inputs = {
        "input_ids": arguments.input_ids,
        "stream": True,
        "sampling_parameters": json.dumps(sampling_parameters(arguments)),
    }
    received = 0
    with closing(Request(arguments.url, arguments.timeout)) as request:
        for result in request.start(arguments.model, inputs, ["output_ids"]):
            ids = result.as_numpy("output_ids").reshape(-1).tolist()
            received += len(ids)
            print(*ids, end=" ", flush=True)
    print()
    if not received:
        raise ExampleError("the answer was empty")


if __name__ == "__main__":
    run(main)
