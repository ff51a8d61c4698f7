-- The model that sees, reads and acts: what goes in and out, the decoder against the language model's own, files.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local diffusion, hub, models = require "tycho.diffusion", require "tycho.hub", require "tycho.models"

local function model()
  ty.manual_seed(3)
  return models.ActionModel { words = { "a", "b", "c" }, image_size = 32, patch_size = 8, tower_channels = 8,
    phrase_length = 4, text_config = { hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2,
      num_attention_heads = 2, max_position_embeddings = 64 }, head_hidden_size = 16, head_layers = 1,
    head_heads = 2 }:eval()
end
local observation = { images = ty.randn(3, 3, 32, 32), states = ty.randn(3, 4),
  words = ty.tensor({ { 2, 3, 0, 0 }, { 4, 2, 3, 0 }, { 3, 0, 0, 0 } }, { dtype = "i64" }) }
local function apart(a, b) return (a - b):abs():max():item() end

check.test("shapes, and the decoder is the language model", function()
  local m = model()
  ty.no_grad(function()
    local x = m:embed(observation)
    check.equal(x.shape, { 3, 16 + 4 + 2, 16 })
    local query = m:encode(observation).query
    check.equal(query.shape, { 3, 16 })
    local tokens = ty.zeros({ 3, 22 }, { dtype = "i64" })
    local want = m.language_model:hidden(tokens, { embeddings = x }):select(1, 21)
    check.ok(apart(query, want) < 1e-5)
    local positions = ty.arange(22):expand(3, 22)
    check.ok(apart(m:decode(x, { positions = positions }), want) < 1e-5)
    local y = m:denoise(ty.randn(6, 4, 3), ty.full({ 6 }, 10), { query = query })
    check.equal(y.shape, { 6, 4, 3 })
  end)
end)

check.test("each m samples belong to one condition", function()
  local m = model()
  ty.no_grad(function()
    local condition = m:encode(observation)
    local x = ty.randn(1, 4, 3):expand(6, 4, 3)
    local y = m:denoise(x, ty.full({ 6 }, 10), condition)
    check.ok(apart(y:select(0, 0), y:select(0, 1)) < 1e-6)
    check.ok(apart(y:select(0, 1), y:select(0, 2)) > 1e-6)
  end)
end)

check.test("joints turn all the way round", function()
  local m = model()
  ty.no_grad(function()
    local turned = { images = observation.images, words = observation.words, states = observation.states:clone() }
    turned.states:select(1, 0):add_(2 * math.pi)
    check.ok(apart(m:encode(turned).query, m:encode(observation).query) < 1e-4)
  end)
end)

check.test("it learns what a plan is", function()
  local m = model():train()
  local plans = ty.tensor { { 0.5, -0.5, 1 }, { -0.5, 0.2, -1 }, { 0, 0.8, 1 } }:unsqueeze(1):expand(3, 4, 3)
  local process = diffusion.DDPM { steps = 100, predict = "sample", drop = 0 }
  local optimizer = ty.optim.AdamW(m:parameters(), { lr = 5e-3 })
  ty.manual_seed(0)
  for _ = 1, 60 do
    ty.scope(function() optimizer:step((diffusion.policy.loss(process, m, observation, plans, { samples = 8 }))) end)
  end
  local drawn = diffusion.policy.draw(process, m:eval(), observation, { 4, 3 }, { steps = 10, seeds = { 1, 2, 3 } })
  check.ok(apart(drawn, plans) < 0.3, ("%.3f"):format(apart(drawn, plans)))
end)

check.test("a folder of files", function()
  local m, folder = model(), scratch.file "action"
  m:save(folder)
  local again = hub.load(folder)
  ty.no_grad(function() check.equal(apart(again:encode(observation).query, m:encode(observation).query), 0) end)
  check.equal(again.config.words, { "a", "b", "c" })
end)

check.test("wrong arguments", function()
  local m = model()
  local function with(changes)
    local o = {}
    for key, value in pairs(observation) do o[key] = value end
    for key, value in pairs(changes) do o[key] = value end
    return function() m:encode(o) end
  end
  check.fails(with { images = ty.ones(3, 3, 16, 16) }, "observation.images: expected [n, 3, 32, 32]")
  check.fails(with { words = ty.ones({ 3, 5 }, { dtype = "i64" }) }, "observation.words: expected [3, 4]")
  check.fails(with { states = ty.ones(3, 3) }, "observation.states: expected [3, 4]")
  check.fails(function() models.ActionModel { words = { "a" }, text_config = {}, patch_size = 7 } end, "patch_size")
end)

check.finish()
