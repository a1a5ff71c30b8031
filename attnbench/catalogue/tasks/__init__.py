"""The tasks for training, in the order shown to users; imported at the first look-up in the table of tasks."""

from attnbench.catalogue.tasks import recall as recall
from attnbench.catalogue.tasks import mqar as mqar
from attnbench.catalogue.tasks import chains as chains
from attnbench.catalogue.tasks import permutations as permutations
from attnbench.catalogue.tasks import copy as copy
from attnbench.catalogue.tasks import duplication as duplication
from attnbench.catalogue.tasks import listops_task as listops_task
from attnbench.catalogue.tasks import digits as digits
from attnbench.catalogue.tasks import reviews as reviews
from attnbench.catalogue.tasks import image as image
from attnbench.catalogue.tasks import retrieval as retrieval
from attnbench.catalogue.tasks import pathfinder as pathfinder
from attnbench.catalogue.tasks import contours as contours
from attnbench.catalogue.tasks import next_byte as next_byte
from attnbench.catalogue.tasks import detection as detection
from attnbench.catalogue.tasks import contacts as contacts
