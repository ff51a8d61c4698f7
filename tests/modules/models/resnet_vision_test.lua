-- A residual network as the tower of a model that sees.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local hub, models = require "tycho.hub", require "tycho.models"

ty.manual_seed(1)
local resnet = models.ResNet { channels = { 4, 6 }, blocks = { 1, 1 }, small = true, classes = 3 }
-- Statistics other than those that norms begin with.
for _ = 1, 3 do resnet(ty.randn(4, 3, 16, 16) + 1) end
resnet:eval()
local tower = models.ResNetVisionModel.around(resnet, 16):eval()
local pictures = ty.randn(2, 3, 16, 16)

check.test("features are the normalised maps of each place with the first stage's means, after their mean", function()
  check.equal(tower.shallow.weight:abs():max():item(), 0.0)
  ty.no_grad(function() tower.shallow.weight:copy_(ty.randn(6, 4)) end)
  check.equal({ tower.config.hidden_size, tower.config.patch_size, tower.rows }, { 6, 2, 8 })
  local x, pooled = ty.no_grad(function() return tower(pictures) end)
  check.equal(x.shape, { 2, 65, 6 })
  local stages = ty.no_grad(function() return resnet:pyramid(pictures) end)
  local maps = stages[2]
  check.equal((maps - resnet:maps(pictures)):abs():max():item(), 0.0)
  check.equal((stages[1] - ty.no_grad(resnet.maps, resnet, pictures, 1)):abs():max():item(), 0.0)
  check.fails(function() resnet:maps(pictures, 9) end, "ResNet:maps: stage: expected an integer in [1, ")
  for _, at in ipairs { { 0, 0 }, { 3, 5 }, { 7, 7 } } do
    local v = maps:select(2, at[1]):select(2, at[2]):select(0, 1)
    local want = (v - v:mean()) / (v:var({ 0 }, 0) + 1e-5):sqrt()
      + tower.position_embedding.weight:detach():select(0, at[1] * 8 + at[2])
    local first = stages[1]:select(0, 1):narrow(1, at[1] * 2, 2):narrow(2, at[2] * 2, 2):mean { 1, 2 }
    want = want + ty.linear(first, tower.shallow.weight:detach())
    check.ok((x:select(0, 1):select(0, 1 + at[1] * 8 + at[2]) - want):abs():max():item() < 1e-4)
  end
  check.equal((pooled - x:select(1, 0)):abs():max():item(), 0.0)
end)

check.test("norms of the network keep their statistics in training, and it can be left as it is", function()
  local before = tower.resnet.bn1.running_mean:tolist()
  tower:train()
  tower.resnet:requires_grad_(false)
  local x = tower:hidden(pictures)
  x:square():sum():backward()
  check.equal(tower.resnet.bn1.running_mean:tolist(), before)
  check.equal(tower.resnet.conv1.weight.grad == nil, true)
  check.ok(tower.position_embedding.weight.grad ~= nil)
  tower:eval()
  check.close(tower:hidden(pictures):tolist(), x:tolist(), 1e-6)
end)

check.test("a Llava with such a tower is a folder as others are", function()
  local vision = tower:published_config()
  local model = models.Llava { model_type = "llava", image_token_index = 1, vision_feature_layer = -1,
    tie_word_embeddings = true, vision_config = vision,
    text_config = { model_type = "llama", vocab_size = 20, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 1, num_attention_heads = 2, tie_word_embeddings = true } }:eval()
  model.vision_tower:load_state_dict(tower:state_dict())
  local folder = os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder)
  model:save(folder)
  local again = hub.load(folder)
  local row = { 5, 6 }
  for k = 1, 64 do row[k + 2] = 1 end
  local tokens = ty.tensor({ row }, { dtype = "i64" })
  local one = { pictures = pictures:narrow(0, 0, 1) }
  check.equal(again(tokens, one):tolist(), model(tokens, one):tolist())
  check.equal(getmetatable(again.vision_tower).__name, "ResNetVisionModel")
  os.execute(("rm -rf '%s'"):format(folder))
end)

check.test("what it cannot see is one clear error", function()
  check.fails(function() tower:hidden(ty.randn(2, 3, 8, 8)) end, "pictures: expected [n, 3, 16, 16]")
  check.fails(function() tower:hidden(pictures, { layer = -2 }) end, "layer: expected -1 or 1")
  check.fails(function() models.ResNetVisionModel.around(tower, 16) end, "resnet: expected a ResNet")
end)

check.finish()
