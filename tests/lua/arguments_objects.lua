-- What arguments_walk.lua walks besides the functions that it finds by itself.
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local objects = { list = {}, good = {} }

--- With what an error about contents begins, besides names of functions: what it is that has them.
objects.words = { "JSON", "image", "png" }

--- Methods that are not called, and why.
objects.skipped = {
  define = "makes classes of optimizers, for the library's own files",
  parameters_of = "reads arguments of the functions that are walked",
  step_scaled = "called by GradScaler:step", limit = "called by optimizers", control = "called by optimizers",
  advance = "called by optimizers", averages_of_weights = "called by optimizers", others = "called by optimizers",
  move = "called by optimizers",
}

--- The modules above the library.
objects.families = { "llm", "diffusion", "vision", "peft", "quant", "prune" }

local function object(name, make) table.insert(objects.list, { name = name, make = make }) end

local function parameter() return ty.ones(2):requires_grad_() end

object("Linear", function() return nn.Linear(2, 3) end)
object("Embedding", function() return nn.Embedding(4, 2) end)
object("Dropout", function() return nn.Dropout(0.5) end)
object("Flatten", function() return nn.Flatten() end)
object("Identity", function() return nn.Identity() end)
object("Conv2d", function() return nn.Conv2d(1, 2, 3) end)
object("Conv1d", function() return nn.Conv1d(1, 2, 3) end)
object("ConvTranspose2d", function() return nn.ConvTranspose2d(1, 2, 3) end)
object("LayerNorm", function() return nn.LayerNorm(2) end)
object("RMSNorm", function() return nn.RMSNorm(2) end)
object("GroupNorm", function() return nn.GroupNorm(1, 2) end)
object("BatchNorm1d", function() return nn.BatchNorm1d(2) end)
object("BatchNorm2d", function() return nn.BatchNorm2d(2) end)
object("Sequential", function() return nn.Sequential(nn.Linear(2, 2), nn.ReLU()) end)
object("ModuleList", function() return nn.ModuleList { nn.Linear(2, 2) } end)
object("ModuleDict", function() return nn.ModuleDict { a = nn.Linear(2, 2) } end)
object("ParameterList", function() return nn.ParameterList { ty.ones(2) } end)
object("ReLU", function() return nn.ReLU() end)
object("GELU", function() return nn.GELU() end)
object("Softmax", function() return nn.Softmax() end)
object("MaxPool2d", function() return nn.MaxPool2d(2) end)
object("AvgPool2d", function() return nn.AvgPool2d(2) end)
object("AdaptiveAvgPool2d", function() return nn.AdaptiveAvgPool2d(1) end)
object("Upsample", function() return nn.Upsample { scale = 2 } end)
object("MultiheadAttention", function() return nn.MultiheadAttention(4, 2) end)
object("TransformerEncoderLayer", function() return nn.TransformerEncoderLayer(4, 2, { feedforward = 4 }) end)
object("LSTM", function() return nn.LSTM(2, 2) end)
object("GRU", function() return nn.GRU(2, 2) end)
object("SLSTM", function() return nn.SLSTM(2, 2) end)
object("SGD", function() return optim.SGD { parameter() } end)
object("AdamW", function() return optim.AdamW { parameter() } end)
object("EMA", function() return optim.EMA(nn.Linear(1, 1)) end)
object("GradScaler", function() return optim.GradScaler() end)
object("Scheduler", function() return optim.Scheduler(optim.SGD { parameter() }, optim.constant()) end)

local tokenizer = ty.tokenizer.train({ "some words and some more words" }, { vocabulary = 270 })
object("tokenizer", function() return tokenizer end)
table.insert(objects.good, function() return tokenizer end)
table.insert(objects.good, function() return optim.SGD { parameter() } end)
table.insert(objects.good, function() return nn.Sequential(nn.Linear(2, 2), nn.ReLU()) end)
table.insert(objects.good, function() return { ty.ones(2), ty.ones(2) } end)

return objects
