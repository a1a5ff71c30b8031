"""The arithmetic of attention that algorithms share; nothing here is named after an algorithm.

An engine imports other engines, shapes and errors, but nothing from :mod:`attnbench.catalogue.attention`; a test checks
that.

========== ===============================================================================
Word       Meaning, here and in all names
========== ===============================================================================
tile       some rows of queries with the keys that they see, in cache at a time
chunk      consecutive tokens whose pairs are formed; a state holds all that came before
block      consecutive or equally spaced tokens seen as one, the parts of a pattern
run        consecutive tokens that are averaged into one
stretch    a thousand tokens or so, computed one after the other to keep memory constant
group      a range of batch entries and a range of heads, computed together
plan       which queries meet which keys in one call, as indices, before any product
========== ===============================================================================

================= ===================================================== ===============================================
Room              Content                                               Users
================= ===================================================== ===============================================
``precision``     the dtype of sums, the number that hides a pair       nearly all
``masks``         a key mask's effect on logits and outputs             nearly all
``products``      matrix products, each by the faster library           patterns, linear, low_rank, efficient, reformer
``tiling``        pieces of tensors that fit a cache                    nearly all
``forms``         operations, or a fused kernel that gave their numbers all with a form
``fla``           flash-linear-attention's kernels                      linear, taylor, gla, ssd, delta, fox, nsa
``head_groups``   heads of one layer with modules of their own          sparse, per-head
``head_layer``    projections before and after the heads of a layer     fox, path, gla, mesa, abc
``shared_heads``  heads of queries that share keys and values           all without such heads of their own
``documents``     documents of one sequence, each read alone            all that read a sequence as one sum or state
``pair_scores``   softmax over any score of two vectors                 additive, bilinear, location, monotonic
``rotation``      rotary positions                                      linear, msa, mla, csa, hca
``fused_softmax`` PyTorch's kernels for calls without a form            sdpa, mla
``linear``        φ(q)·φ(k): feature maps, sums of keys                 linear, performer, rfa, hedgehog, taylor
``patterns``      softmax over blocks and bands of keys                 local, sparse, longformer, etc, bigbird
``gathered``      rows found by sorting, hashing, or in a list          topk, indexed, nsa, csa, reformer, graph
``blocks``        softmax over blocks of keys chosen by content         moba, msa, xattention, minference, sta
``low_rank``      few queries or few keys, and runs of tokens           linformer, nystrom, skyformer, perceiver
``recurrent``     states that fade, and sums of plain features          retnet, gla, ssd, delta, rwkv7, kernel
``fourier``       kernels as long as the sequence                       long-conv, s4d
``decoding``      caches of keys and values, one token at a time        all that decode
``flex``          FlexAttention, compiled for each module               flex, bigbird
================= ===================================================== ===============================================

Some of this exists for the speed of a CPU alone, and decides the figures there: ``products`` gives each product to
the faster of torch's two libraries, ``gathered`` ranks floats by their bits, ``low_rank`` and ``linear`` keep tiles in
the cache, and ``patterns`` takes few heads at a time if more would be copied.
"""
