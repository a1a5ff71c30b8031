"""Softmax attention whose steps after a prompt read a part of its keys; the others are evicted, or left in pages."""

from attnbench.catalogue.attention.selection.kv_budget.expected_attention import ExpectedAttention as ExpectedAttention
from attnbench.catalogue.attention.selection.kv_budget.h2o import H2O as H2O
from attnbench.catalogue.attention.selection.kv_budget.keydiff import KeyDiff as KeyDiff
from attnbench.catalogue.attention.selection.kv_budget.knorm import Knorm as Knorm
from attnbench.catalogue.attention.selection.kv_budget.quest import Quest as Quest
from attnbench.catalogue.attention.selection.kv_budget.snapkv import SnapKV as SnapKV
from attnbench.catalogue.attention.selection.kv_budget.tova import Tova as Tova
