"""Results of lmlong that a refactoring must keep to the last bit, as digests by case.

`digests` compares values, `workspace` is where runs are trained, `variants` lists the models, `model_step` is the only
module that imports what may move, and the others hold the cases: `gradients`, `training`, `processes`, `decoding` and
`exports`. `exact` measures all of them, and `machine` names what else they depend on.
"""
