-- A judge of scenes: a vision transformer
-- claim: of 90 objects it ranks the scenes that show one before those that do not, at a mean average precision of 0.95
-- system: a ViT of 1.5 million parameters on 8 x 8 patches of 64 x 64 pictures
-- paper: Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words: Transformers for Image Recognition at Scale"
-- time: 55 minutes a seed on one CPU core
--
-- It says which of 1,900 sentences are true of a scene, "there is an apple", "... a red apple", "... an apple at the
-- top left", and the subgroup of an emoji. Scenes are drawn as training goes on, so hardly any is seen twice; an eighth
-- of a batch are single emoji. The bar is on the objects; colours and places are what judges of drawn pictures need.
--
-- Labels of patches (what is on top there, and in which colour) and Muon for the matrices of its layers are what make
-- it learn: after 5,000 steps it is beyond what scene-resnet, of nearly as many parameters, reaches in 10,000 of AdamW.
-- Products of training are in bf16, which takes half the time where the processor has instructions for them.
local ty = require "tycho"
local models, zoo = require "tycho.models", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 2, recorded_seeds = 2, base = true,
  args = zoo.scenes.arguments({ steps = 7000, batch = 64, lr = 2e-2, every = 500, quick = 4, quick_count = 40 }, {
    { "width", 128, "hidden size", quick = 16 },
    { "layers", 6, "layers", quick = 1 },
    { "dtype", "bf16", "of products in training", choices = { "f32", "bf16" } },
  }) }
local args = r.args
local labels = zoo.judge.labels()

-- The logits of a network, and the hidden states of its patches.
local function see(network, pictures)
  local hidden = network.vit:hidden(pictures)
  return network.classifier(hidden:select(1, 0)), hidden:narrow(1, 1, hidden.shape[2] - 1)
end

local rows = zoo.judge.rows(r, function()
  local model = models.ViTForImageClassification { image_size = 64, patch_size = 8, hidden_size = args.width,
    intermediate_size = 4 * args.width, num_hidden_layers = args.layers,
    num_attention_heads = math.max(1, args.width // 32),
    num_labels = #labels, problem_type = "multi_label_classification" }
  -- Few sentences are true, and no steps are spent to learn that.
  ty.no_grad(function() model.classifier.bias:fill_(-5) end)
  return model
end, see, args.width, { optimizer = zoo.scenes.muon, autocast = args.dtype })
if args.publish then zoo.publish(r, rows, function(folder) zoo.scenes.write(r, folder) end) end
os.exit(r:finish(rows), true)
