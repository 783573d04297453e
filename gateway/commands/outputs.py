"""Output files of commands: checked before the work, written beside their place, and put there by an atomic rename."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from engine.errors import ConfigError


def disk_error(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read or written, with the way out."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"{path}: {reason}; make room and run the same command again, which continues")
    return ConfigError(f"{path}: {reason}")


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths name one file: by another spelling, a symbolic link or a hard link."""
    try:
        return first.samefile(second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `path` that replaces it at the end of the block. A symbolic link remains one.

    Raises ConfigError if the file cannot be written. After an error `path` is as it was.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{_prefix(target)}{token_hex(8)}.part")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "this is a folder; name a file")
        with part.open("xb") as file:
            if target.exists():
                shutil.copymode(target, part)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
        part.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raise ConfigError if `replacing` would fail now. Remove files that killed runs have left."""
    target = Path(os.path.realpath(path))
    try:
        for left in target.parent.glob(f"{_prefix(target)}*.part"):
            left.unlink(missing_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "this is a folder; name a file")
        part = target.with_name(f"{_prefix(target)}{token_hex(8)}.part")
        part.open("xb").close()
        part.unlink()
    except OSError as error:
        raise disk_error(path, error) from None


def _prefix(target: Path) -> str:
    return f".tidemill-{blake2b(os.fsencode(target.name), digest_size=8).hexdigest()}-"
