"""Softmax attention whose steps after a prompt read a part of its keys; the others are evicted, or left in pages."""

from attnbench.attention.kv_budget.expected import ExpectedAttention as ExpectedAttention
from attnbench.attention.kv_budget.h2o import H2O as H2O
from attnbench.attention.kv_budget.keydiff import KeyDiff as KeyDiff
from attnbench.attention.kv_budget.knorm import Knorm as Knorm
from attnbench.attention.kv_budget.quest import Quest as Quest
from attnbench.attention.kv_budget.snapkv import SnapKV as SnapKV
from attnbench.attention.kv_budget.tova import Tova as Tova
