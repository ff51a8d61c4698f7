--- Training loops, metrics and checkpoints: require "tycho".train.
local checkpoint = require "tycho.train.checkpoint"

return require "tycho.lazy" ({
  steps = require "tycho.train.steps",
  fit = require "tycho.train.fit",
  minimize = require "tycho.train.minimize",
  kept = require "tycho.train.kept",
  evaluate = require "tycho.train.evaluate",
  Logger = require "tycho.train.logger",
  progress = require "tycho.train.progress",
  save_checkpoint = checkpoint.save,
  load_checkpoint = checkpoint.load,
  resume_checkpoint = checkpoint.resume,
  has_checkpoint = checkpoint.exists,
  remove_checkpoint = checkpoint.remove,
}, {}, "ty.train")
