"""The tasks for training, in the order shown to users; imported at the first look-up in the table of tasks."""

from attnbench.tasks import recall as recall
from attnbench.tasks import mqar as mqar
from attnbench.tasks import copy as copy
from attnbench.tasks import duplication as duplication
from attnbench.tasks import listops_task as listops_task
from attnbench.tasks import digits as digits
from attnbench.tasks import text as text
from attnbench.tasks import image as image
from attnbench.tasks import retrieval as retrieval
from attnbench.tasks import pathfinder as pathfinder
from attnbench.tasks import contours as contours
from attnbench.tasks import next_byte as next_byte
from attnbench.tasks import detection as detection
from attnbench.tasks import contacts as contacts
