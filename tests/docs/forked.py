"""Run `limitforge` commands in forks of a process that has imported it: a block of many commands costs one import.

python -m tests.docs.forked <socket>         the process that forks
python -SE forked.py ask <socket> <command>  one command, with the streams, folder and environment of its caller
"""

import json
import os
import select
import socket
import sys
import traceback
from typing import Any, NoReturn

MAX_ORDER = 1 << 20


def ask(path: str, *arguments: str) -> int:
    """The exit status of the command."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        folder = os.getcwd()  # noqa: PTH109 - pathlib takes as long to import as all the rest
        order = {"arguments": arguments, "folder": folder, "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
        return int(connection.recv(16) or 70)


def serve(path: str) -> None:
    """Until stdin ends."""
    from limitforge.cli import app, config, db, keys, plans  # noqa: F401 - what the forks need

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)  # noqa: T201
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                content, files, _, _ = socket.recv_fds(connection, MAX_ORDER, 3)
                child = os.fork()
                if not child:
                    run(json.loads(content), files)
                for file in files:
                    os.close(file)
                _, status = os.waitpid(child, 0)
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def run(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the command."""
    from limitforge.cli import main

    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["limitforge", *order["arguments"]]
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 - the command has to end here
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask(*sys.argv[2:]))
    serve(sys.argv[1])
