"""A child that answers each frame with itself."""

import socket
import sys

from shoal.net.process import die_with_parent, serve

if __name__ == "__main__":
    die_with_parent()
    serve(socket.socket(fileno=int(sys.argv[-1])), lambda frame: [frame])
