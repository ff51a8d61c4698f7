-- A language model with weights and activations in 4 bits, large channels split and similar ones merged
-- claim: adds at most 14 % of what plain W4A4 adds where activations have outliers, as in the paper, and less as it is
-- system: QLLM on the zoo's kjv-lm, as it is and with outliers put into its norms
-- paper: Liu et al. 2024, "QLLM: Accurate and Efficient Low-Bitwidth Quantization for Large Language Models"
-- time: 4 minutes on one CPU core
--
-- Weights are rounded by rows and activations by tokens, in all linear layers of the blocks; attention scores are not.
-- kjv-lm is too small to have the outliers that the method is for: so the same is done to it after two channels of each
-- norm were made 30 times as large and the columns behind them as much smaller, which changes nothing in f32. The
-- kurtosis of what layers get is printed for both. SmoothQuant has the better of two strengths, QLLM low-rank weights
-- outside or inside of the rounding, both by chapters of their own and with the first seed. Factors of channels are
-- just what SmoothQuant undoes, so that it is not judged by outliers that were made by factors, but by the model as it
-- is. Disassembly alone leaves the layers wider. All have the same rows of calibration; tuning alone has the low-rank
-- weights, too. The first bar is the paper's: the nats that QLLM adds to those of LLaMA-1-13B in f16, of what no
-- reassembly adds (table 2, WikiText2).
local ty = require "tycho"
local quant, zoo = require "tycho.quant", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "rows", 16, "rows of training text to calibrate and tune with", quick = 1 },
    { "batch", 2, "rows in a step of tuning", quick = 1 },
    { "epochs", 3, "of tuning", quick = 1 },
    { "lr", 1e-3, "rate of low-rank weights" },
    { "rank", 4, "of low-rank weights" },
    { "outliers", 30, "what two channels of each norm are multiplied by" },
    { "chapters", 16, "chapters to measure on", quick = 1 },
    { "books", 66, "of the Bible", quick = 1 },
  },
}
local args = r.args
local whole = zoo.load(r.quick and "kjv-draft" or "kjv-lm", { device = r.device })
local corpus, loss = zoo.language.unseen(r:path "corpus", { books = args.books, chapters = args.chapters,
  device = r.device })

-- The same function, with two channels of each norm that are far larger than the others.
local function with_outliers(model)
  model = model:clone()
  local width = model.config.hidden_size
  ty.no_grad(function()
    for _, layer in ipairs(model.model.layers) do
      local a, m = layer.self_attn, layer.mlp
      for norm, behind in pairs { input_layernorm = { a.q_proj, a.k_proj, a.v_proj },
        post_attention_layernorm = { m.gate_proj, m.up_proj } } do
        for k = 1, 2 do
          local channel = (37 * k + 11) % width
          layer[norm].weight:detach():narrow(0, channel, 1):mul_(args.outliers)
          for _, linear in ipairs(behind) do linear.weight:detach():narrow(1, channel, 1):div_(args.outliers) end
        end
      end
    end
  end)
  return model
end

local ways = {
  { name = "plain", o = { channels = "none", epochs = 0 } },
  { name = "SmoothQuant", o = { channels = "smooth", epochs = 0 }, choices = { { strength = 0.5 },
    { strength = 0.8 } } },
  { name = "disassembly alone", o = { channels = "split", epochs = 0 } },
  { name = "reassembly alone", o = { channels = "assembled", epochs = 0 } },
  { name = "tuning alone", o = { channels = "none" } },
  { name = "QLLM", o = { channels = "assembled" }, choices = { { fused = false }, { fused = true } } },
}

local function quantized(base, way, choice, seed)
  local o = { rows = args.rows, batch = args.batch, seed = seed, device = r.device, rank = args.rank, lr = args.lr,
    epochs = args.epochs }
  for _, list in ipairs { way.o, choice or {} } do
    for key, value in pairs(list) do o[key] = value end
  end
  local model = base:clone()
  return model, quant.qllm.quantize(model, corpus.training, o)
end

local found, pictures, wider = {}, {}, 0
local bases = { { "with outliers", with_outliers(whole) }, { "as it is", whole } }
for _, entry in ipairs(bases) do
  local title, base = entry[1], entry[2]
  local exact = loss(base, "measured")
  r:say("%s, f32: perplexity %.4f", title, math.exp(exact))
  found[title] = {}
  for _, way in ipairs(ways) do
    local added = {}
    found[title][way.name] = added
    -- What stands beside the comparison is for the first seed.
    local seeds = way.name:find "alone" and { r.seeds[1] } or r.seeds
    local chosen = way.choices and way.choices[1]
    for i, seed in ipairs(seeds) do
      local model, report
      if i == 1 and way.choices and not r.quick then
        local least = math.huge
        for _, choice in ipairs(way.choices) do
          local m, rep = quantized(base, way, choice, seed)
          local l = loss(m, "choice")
          if l < least then least, chosen, model, report = l, choice, m, rep end
        end
      else
        model, report = quantized(base, way, chosen, seed)
      end
      added[i] = loss(model, "measured") - exact
      r.metrics[("%s/%s/%d"):format(title, way.name, seed)] = added[i]
      if i == 1 then
        local extra, kurtosis = 0, {}
        for k, site in ipairs(report.sites) do extra, kurtosis[k] = extra + site.extra, site.kurtosis end
        r:say("%-13s %-18s %+.4f nats, %.3f bits a weight, %d channels split off, blocks end %.4f away%s", title,
          way.name, added[i], report.bits, extra, report.blocks[#report.blocks].packed,
          chosen and (" (%s)"):format(chosen.strength or chosen.fused and "inside" or "outside") or "")
        if way.name == "plain" then
          r.metrics["kurtosis, " .. title] = ty.stats.mean(kurtosis)
          r:say("%-13s kurtosis of inputs: mean %.1f, largest %.1f", title, ty.stats.mean(kurtosis),
            math.max(table.unpack(kurtosis)))
        elseif way.name == "QLLM" then
          for _, row in ipairs(report) do wider = wider + math.abs(row.channels - row.inputs) end
        end
        if title == "with outliers" and (way.name == "plain" or way.name == "QLLM") then
          pictures[#pictures + 1] = { label = way.name == "plain" and "before" or "threshold",
            y = way.name == "plain" and report.sites[1].largest
              or { math.min(report.sites[1].theta, 1e3), math.min(report.sites[1].theta, 1e3) },
            x = way.name ~= "plain" and { 1, #report.sites[1].largest } or nil }
        end
      end
    end
  end
end
ty.plot.line { title = "the largest values of channels before the first attention, and where they are split",
  series = pictures, x_label = "channel", y_label = "magnitude" }:save(r:picture "qllm.png")

local function ratio(title, name, other)
  local list, baseline = {}, found[title][other]
  for i, x in ipairs(found[title][name]) do list[i] = x / baseline[i] end
  return list, baseline
end
local function row(claim, title, other, bar)
  local values, baseline = ratio(title, "QLLM", other)
  return { claim = claim, values = values, baseline = baseline, bar = bar, below = true, judged = bar ~= nil }
end
os.exit(r:finish {
  row("nats that QLLM adds with outliers, of what plain W4A4 adds", "with outliers", "plain", 0.14),
  row("the same, of what SmoothQuant adds to it with outliers", "with outliers", "SmoothQuant"),
  row("nats that QLLM adds to kjv-lm as it is, of what plain W4A4 adds", "as it is", "plain", 1),
  row("the same, of what SmoothQuant adds", "as it is", "SmoothQuant", 1),
  { claim = "channels that layers have more or fewer than before", measured = wider, bar = 0, below = true },
}, true)
