"""In the sandbox: run tests on request, each time in a child that is forked after the large packages are imported.

Each line of standard input is a JSON list of arguments for pytest, and each line of standard output the answer: the
exit code, negative if a signal has ended the tests, and what they printed. Nothing of our own is imported before the
fork, so that each child runs the code as it is then.
"""

import json
import os
import signal
import sys
import tempfile
from contextlib import suppress

import fastapi  # noqa: F401
import ml_dtypes  # noqa: F401
import pytest
import safetensors  # noqa: F401
import torch  # noqa: F401
from hypothesis import Phase, settings

LIMIT_S = 900
"""For one run of tests. A mutant that lets it take longer is not killed: a test should fail."""

# A kill must not depend on chance, and the smallest example that fails is of no interest.
settings.register_profile("mutants", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                os.setpgid(0, 0)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code: int = pytest.ExitCode.INTERNAL_ERROR
                try:
                    code = pytest.main(["--hypothesis-profile=mutants", *json.loads(line)])
                    sys.stdout.flush()
                finally:
                    os._exit(code)
            # The timer of the child is that of the limit of each test.
            signal.signal(signal.SIGALRM, lambda *_, group=child: os.killpg(group, signal.SIGKILL))
            signal.alarm(LIMIT_S)
            _, status = os.waitpid(child, 0)
            signal.alarm(0)
            # Whatever the tests have started and not ended.
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            output.seek(0)
            answer = [os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
