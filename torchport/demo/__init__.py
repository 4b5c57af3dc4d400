"""What ``torchport demo`` runs: three unmodified PyTorch programs, on CPU eager and on the device."""

import os

# Before torch loads OpenMP: by default its idle threads spin for milliseconds, and where something else wants the
# cores, small models then take ten times as long (measured with GPT-2 on 2 busy cores: 1,243 ms per step, now 115).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
