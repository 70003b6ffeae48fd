"""Files of the Hub for those who may be out of its reach."""

from collections.abc import Callable

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError


def from_hub(download: Callable[..., str], repository: str, repo_type: str, **arguments) -> str | None:
    """
    Args:
        download (`Callable`): `hf_hub_download` or `snapshot_download`, called with all that follows.

    Returns:
        `str`: Where the download is in the cache, made if need be; `None` if the Hub is out of reach.
    """
    arguments |= {"repo_id": repository, "repo_type": repo_type}
    try:
        return download(**arguments, local_files_only=True)
    except LocalEntryNotFoundError:
        pass
    try:  # a download waits for ever on a network that drops packets
        HfApi().repo_info(repository, repo_type=repo_type, timeout=2)
    except Exception:  # whatever keeps us from the Hub: the caller has another way
        return None
    return download(**arguments)
