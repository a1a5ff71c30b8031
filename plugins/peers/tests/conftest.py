from __future__ import annotations

import torch

torch.set_num_threads(1)  # small tensors: a second thread waits more than it works
