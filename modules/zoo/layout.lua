--- What captions say of where things are, learnt from words alone: a small decoder, which has a query of its own for
-- each cell of a scene, says from a text encoder's tokens what is on top there, and the encoder learns with it. The
-- text encoder of a CLIP hardly tells "left" from "right", since its captions seldom need it; a painter that reads such
-- tokens puts things anywhere, and would have to learn places at the times at which there is nothing but noise to see.
--
--     local layout = zoo.layout.train(painter.text_encoder, { loader = loader, read = read, width = 128 },
--       { steps = 600, lr = 2e-3, average = 0.99 })
--     local shown = layout(painter:tokens { "a red apple at the top left" })     -- [1, cells, judge.cell_outputs]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local drawing_judge = require "tycho.zoo.drawing_judge"
local judge = require "tycho.zoo.judge"

local nn = ty.nn
local M = {}

--- A text encoder with a decoder that says what is on top in each cell.
---@class Layout: Module
---@field text_encoder Module
local Layout = nn.module "Layout"

-- read: a function of an encoder and tokens i64 [n, t] that gives what a painter is told of these, [n, t, width].
function Layout:init(text_encoder, read, width, cells)
  self.text_encoder = text_encoder
  rawset(self, "read", read)
  self.at = nn.Parameter(ty.randn(1, cells, width) * 0.5)
  self.layers = nn.ModuleList {}
  for _ = 1, 2 do
    self.layers:append(nn.TransformerDecoderLayer(width, 4, { feedforward = 2 * width, dropout = 0,
      norm_first = true }))
  end
  self.said = nn.Linear(width, judge.cell_outputs)
end

--- tokens i64 [n, t] to what is on top in each cell, [n, cells, judge.cell_outputs].
---@param tokens Tensor
---@return Tensor
function Layout:forward(tokens)
  local words = self.read(self.text_encoder, tokens)
  local h = self.at:expand(words.shape[1], self.at.shape[2], self.at.shape[3])
  for _, layer in ipairs(self.layers) do h = layer(h, words) end
  return self.said(h)
end

--- Where what captions ask for should be, above 0 at each of the nine places of each object where it is, [n, objects *
-- 9], as drawing_judge.places() says it of pictures.
---@param tokens Tensor  i64 [n, t]
---@return Tensor
function Layout:places(tokens)
  local objects = #datasets.scenes.objects
  return ty.no_grad(function()
    return drawing_judge.places(self(tokens):narrow(2, 0, objects + 1):softmax(-1):narrow(2, 0, objects))
  end)
end

--- Trains a text encoder, and a decoder with it. what: loader (of batches with tokens, shares, numbers and colours, as
-- painter.fit has them), read (a function of an encoder and tokens that gives what a painter is told of these, [n, t,
-- width], with gradients), width, cells (64), view (a function of a batch that gives the one to learn from). options:
-- of train.fit. Returns the averaged Layout, with its encoder.
---@param encoder Module
---@param what table
---@param options table
---@return Layout
function M.train(encoder, what, options)
  arguments.expect("layout.train", "encoder", encoder, "a module")
  arguments.expect("layout.train", "options", options, "a table")
  local o = arguments.read("layout.train", what, { loader = arguments.none, read = arguments.none,
    width = arguments.none, cells = 64, view = function(batch) return batch end }, { loader = "a table",
    read = "a function", width = "an integer >= 4", cells = "an integer >= 1", view = "a function" })
  for _, name in ipairs { "loader", "read", "width" } do
    if o[name] == nil then arguments.fail("layout.train: %s: expected one, got nil", name) end
  end
  local fit = { weight_decay = 0.01, loss = function(m, batch)
    batch = o.view(batch)
    return judge.cell_loss(m(batch.tokens), judge.spread(batch.shares:to "f32" / 255, batch.numbers:to "i64",
      batch.colours:to "i64"))
  end }
  for key, value in pairs(options) do fit[key] = value end
  local layout = Layout(encoder, o.read, o.width, o.cells):to(encoder:device())
  return (select(2, ty.train.fit(layout, o.loader, fit)))
end

return M
