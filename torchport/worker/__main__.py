"""``python -m torchport.worker``: how the service starts its process."""

from .main import main

main()
