"""Ends a script on a Python older than LEAST with one line and exit code 2. An old Python first compiles this file and the script
that imports it. So both have the syntax of Python 3.6."""
import os
import sys

LEAST = 3, 9

if sys.version_info < LEAST:
    sys.stderr.write("%s: error: needs Python %d.%d or later, but %s is %s; name another, for make as PYTHON=/path/to/python3\n" % (
        os.path.basename(sys.argv[0]), *LEAST, sys.executable, sys.version.split()[0]))
    sys.exit(2)
