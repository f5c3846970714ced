"""The kernels under Triton's interpreter, against the CPU: prints one JSON object.

TRITON_INTERPRET=1 python tests/compress/device/interpreted.py     # once for the tests of both directions
"""

import json
import sys

from tests.compress.device import decoding_cases, encoding_cases

if __name__ == "__main__":
    results = {"decoding": decoding_cases.results(), "products": decoding_cases.products()}
    sys.stdout.write(json.dumps(results | {"encoding": encoding_cases.results()}))
