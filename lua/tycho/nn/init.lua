--- Neural network modules: require "tycho".nn.
--
--     local Classifier = nn.module "Classifier"
--     function Classifier:init(width) self.head = nn.Linear(width, 10) end
--     function Classifier:forward(x) return self.head(x) end
--     local model = Classifier(64)
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"
require "tycho.nn.state"

local nn = {
  module = base.define,
  Module = base.Module,
  is_module = base.is_module,
  init = require "tycho.nn.initial",
  with_defaults = options.with_defaults,
  options = options.read,
  for_caller = options.for_caller,
  none = options.none,
  surgery = require "tycho.nn.surgery",
  unfused = require "tycho.nn.unfused",
  utils = require "tycho.nn.utils",
}

for _, part in ipairs { "layers", "norms", "containers", "activations", "attention", "recurrent",
  "functional", "positions", "patches", "modulation", "pools", "volumes", "pads", "resizing", "losses", "loss_modules",
  "activation_modules", "dropouts", "channel_norms", "pairings", "transformer", "parametrizations",
  "recurrent_cells", "sequences" } do
  for name, value in pairs(require("tycho.nn." .. part)) do nn[name] = value end
end

--- Lets a tensor want a gradient, so that assigning it to a field makes it a parameter.
function nn.Parameter(tensor)
  return options.placed(options.expect("Parameter", "tensor", tensor, "a tensor")):requires_grad_()
end

return require "tycho.lazy" (nn, {}, "ty.nn")
