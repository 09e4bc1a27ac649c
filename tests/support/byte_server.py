"""Sends so many bytes for each byte that it gets; says `listening PORT`. Arguments: host, bytes."""

import contextlib
import os
import socket
import sys
import threading


def serve(connection: socket.socket, answer: bytes) -> None:
    with connection:
        while connection.recv(1):
            connection.sendall(answer)


def main() -> None:
    host, count = sys.argv[1], int(sys.argv[2])
    # A far host does not wait for this one's CPUs: on busy ones an answer took 70 ms, not 13.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with socket.create_server((host, 0)) as server:
        print(f"listening {server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection, bytes(count)), daemon=True).start()


if __name__ == "__main__":
    main()
