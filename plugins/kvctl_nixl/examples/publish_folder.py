"""Publish the files of a folder out of this process's memory, for `ucx://HOST:PORT`:

python -m kvctl_nixl.examples.publish_folder ./Llama-3.3-70B --host 10.0.0.7 --key-file peer.key
kvctl load-weights ucx://10.0.0.7:PORT/ --transport nixl-ucx        (on another host, KVCTL_PEER_KEY_FILE set)
"""

from __future__ import annotations

import argparse
import os
import threading

from kvctl.core.errors import KvctlError
from kvctl.memory.buffers import HostBuffer
from kvctl_nixl.peer.source import Source


def main() -> int:
    """Serve until interrupted. The URL is the one line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key-file", help="what readers must have too; needed for hosts other than 127.0.0.1")
    options = parser.parse_args()
    key = b""
    if options.key_file:
        with open(options.key_file, "rb") as file:
            key = file.read().strip()
    try:
        with Source(options.host, options.port, key=key) as source:
            for name in sorted(os.listdir(options.folder)):
                path = os.path.join(options.folder, name)
                if os.path.isfile(path):
                    buffer = HostBuffer(os.path.getsize(path))
                    with open(path, "rb", buffering=0) as data:
                        done = 0
                        while done < buffer.nbytes and (got := data.readinto(buffer.view[done:])):
                            done += got
                    source.publish(name, buffer)
            print(source.url, flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    except KvctlError as error:
        print(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
