-- What arguments_walk.lua walks besides the functions that it finds by itself.
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local objects = { list = {}, good = {} }

--- With what an error about contents begins, besides names of functions: what it is that has them.
objects.words = { "JSON", "image", "png", "webp", "CLIP", "flac", "tier" }

--- Methods that are not called, and why.
objects.skipped = {
  define = "makes classes of optimizers, for the library's own files",
  parameters_of = "reads arguments of the functions that are walked",
  step_scaled = "called by GradScaler:step", limit = "called by optimizers", control = "called by optimizers",
  advance = "called by optimizers", averages_of_weights = "called by optimizers", others = "called by optimizers",
  move = "called by optimizers",
  rename = "called by hub.load, once a tensor", from_config = "called by hub.load, of a class",
  restore = "called by hub.load, once a buffer", check_inputs = "a check of what a network was given",
  start = "called by llm.generate, with what it has checked",
  append = "of caches: called by networks, once a layer", see = "of caches: called by networks, once a step",
}

--- The modules above the library: folders of modules/.
objects.families = {}
do
  local modules = (arg[0]:match ".*/" or "./") .. "../../modules/"
  for _, name in ipairs(ty.io.listdir(modules)) do
    if ty.io.exists(modules .. name .. "/init.lua") then table.insert(objects.families, name) end
  end
end

local function object(name, make) table.insert(objects.list, { name = name, make = make }) end

local function parameter() return ty.ones(2):requires_grad_() end

object("Linear", function() return nn.Linear(2, 3) end)
local function served()
  return require("tycho.llm").Llama { vocab_size = 7, hidden_size = 4, intermediate_size = 4, num_hidden_layers = 1,
    num_attention_heads = 1, max_position_embeddings = 16 }
end
object("ServeEngine", function() return require("tycho.serve").engine(served(), { room = 64 }) end)
object("ServeRequest", function()
  return require("tycho.serve").engine(served(), { room = 64 }):submit({ 1 }, { count = 2 })
end)
object("Learner", function() return require("tycho.local").blocks.end_to_end { nn.Linear(2, 2) } end)
object("WaveSystem", function() return require("tycho.local").waves.fibre { inputs = 2, outputs = 2 } end)
object("Deactivation", function()
  return require("tycho.peft").ce_ssl.attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {})
end)
object("Tracker", function()
  return require("tycho.vision").track.Tracker(require("tycho.models").ViT({ image_size = 8, patch_size = 4,
    hidden_size = 4, intermediate_size = 4, num_hidden_layers = 1, num_attention_heads = 1 }, false))
end)
object("SlimFit", function()
  return require("tycho.peft").slimfit.attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), { pack = false })
end)
object("Stream", function() return ty.data.stream(function() return function() return nil end end) end)
object("Sparse", function() return ty.sparse.from_dense(ty.eye(3)) end)
object("Cached", function() return ty.data.cache(ty.data.TensorDataset { x = ty.ones(4, 2) }) end)
object("Parametrized", function() return nn.orthogonal(nn.Linear(2, 2)) end)
object("Embedding", function() return nn.Embedding(4, 2) end)
object("Dropout", function() return nn.Dropout(0.5) end)
object("Flatten", function() return nn.Flatten() end)
object("Profile", function()
  return (ty.profile(function() return ty.ones(2) + 1 end, { limits = { flops = 1, bandwidth = 1 } }))
end)
object("EnergyMeter", function() return ty.energy.meter() end)
object("TimeModel", function()
  return ty.profile.fit_time { { seconds = 1, seen = { products = 1, convolutions = 0, bytes = 2, kernels = 3 } } }
end)
object("ExpertRing", function()
  local model = require("tycho.models").Mixtral { vocab_size = 4, hidden_size = 4, intermediate_size = 4,
    num_hidden_layers = 1, num_attention_heads = 1, num_key_value_heads = 1, num_local_experts = 2,
    num_experts_per_tok = 1, max_position_embeddings = 4 }
  return require("tycho.offload").expert_ring(model)
end)
object("ExpertCache", function() return require("tycho.offload").expert_cache { experts = 4, slots = 2 } end)
object("Identity", function() return nn.Identity() end)
object("Conv2d", function() return nn.Conv2d(1, 2, 3) end)
object("Conv1d", function() return nn.Conv1d(1, 2, 3) end)
object("ConvTranspose2d", function() return nn.ConvTranspose2d(1, 2, 3) end)
object("LayerNorm", function() return nn.LayerNorm(2) end)
object("RMSNorm", function() return nn.RMSNorm(2) end)
object("GroupNorm", function() return nn.GroupNorm(1, 2) end)
object("BatchNorm1d", function() return nn.BatchNorm1d(2) end)
object("BatchNorm2d", function() return nn.BatchNorm2d(2) end)
object("BatchNorm3d", function() return nn.BatchNorm3d(2) end)
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
object("MaxPool3d", function() return nn.MaxPool3d(2) end)
object("AvgPool1d", function() return nn.AvgPool1d(2) end)
object("MaxUnpool2d", function() return nn.MaxUnpool2d(2) end)
object("LPPool2d", function() return nn.LPPool2d(2, 2) end)
object("AdaptiveMaxPool1d", function() return nn.AdaptiveMaxPool1d(1) end)
object("Conv3d", function() return nn.Conv3d(1, 2, 3) end)
object("ConvTranspose1d", function() return nn.ConvTranspose1d(1, 2, 3) end)
object("ConvTranspose3d", function() return nn.ConvTranspose3d(1, 2, 3) end)
object("ReflectionPad2d", function() return nn.ReflectionPad2d(1) end)
object("ConstantPad1d", function() return nn.ConstantPad1d(1, 2) end)
object("Unfold", function() return nn.Unfold(2) end)
object("Fold", function() return nn.Fold(4, 2) end)
object("PixelShuffle", function() return nn.PixelShuffle(2) end)
object("Upsample", function() return nn.Upsample { scale = 2 } end)
object("MultiheadAttention", function() return nn.MultiheadAttention(4, 2) end)
object("TransformerEncoderLayer", function() return nn.TransformerEncoderLayer(4, 2, { feedforward = 4 }) end)
object("LSTM", function() return nn.LSTM(2, 2) end)
object("GRU", function() return nn.GRU(2, 2) end)
object("SLSTM", function() return nn.SLSTM(2, 2) end)
object("RNN", function() return nn.RNN(2, 2) end)
object("RNNCell", function() return nn.RNNCell(2, 2) end)
object("LSTMCell", function() return nn.LSTMCell(2, 2) end)
object("GRUCell", function() return nn.GRUCell(2, 2) end)
object("TransformerDecoderLayer", function() return nn.TransformerDecoderLayer(4, 2, { feedforward = 4 }) end)
object("TransformerEncoder", function()
  return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, { feedforward = 4 }), 1)
end)
object("TransformerDecoder", function()
  return nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, { feedforward = 4 }), 1)
end)
object("Transformer", function()
  return nn.Transformer(4, 2, { feedforward = 4, encoder_layers = 1, decoder_layers = 1 })
end)
object("InstanceNorm2d", function() return nn.InstanceNorm2d(2) end)
object("LocalResponseNorm", function() return nn.LocalResponseNorm(2) end)
object("Dropout2d", function() return nn.Dropout2d(0.5) end)
object("AlphaDropout", function() return nn.AlphaDropout(0.5) end)
object("Hardtanh", function() return nn.Hardtanh() end)
object("PReLU", function() return nn.PReLU() end)
object("RReLU", function() return nn.RReLU() end)
object("GLU", function() return nn.GLU() end)
object("EmbeddingBag", function() return nn.EmbeddingBag(3, 2) end)
object("Unflatten", function() return nn.Unflatten(0, { 1, -1 }) end)
object("Bilinear", function() return nn.Bilinear(2, 2, 2) end)
object("CosineSimilarity", function() return nn.CosineSimilarity() end)
object("PairwiseDistance", function() return nn.PairwiseDistance() end)
object("CrossEntropyLoss", function() return nn.CrossEntropyLoss() end)
object("CTCLoss", function() return nn.CTCLoss() end)
object("TripletMarginLoss", function() return nn.TripletMarginLoss() end)
object("SGD", function() return optim.SGD { parameter() } end)
object("AdamW", function() return optim.AdamW { parameter() } end)
object("RMSprop", function() return optim.RMSprop { parameter() } end)
object("LBFGS", function() return optim.LBFGS { parameter() } end)
object("SAM", function() return optim.SAM(optim.SGD { parameter() }) end)
object("OrderEffects", function() return optim.order_effects({ parameter() }, { optimizer = optim.SGD }) end)
object("MeZO", function() return optim.MeZO { parameter() } end)
object("DoG", function() return optim.DoG { parameter() } end)
object("ScheduleFree", function() return optim.ScheduleFree { parameter() } end)
object("Mechanic", function() return optim.Mechanic(optim.SGD { parameter() }) end)
object("ReduceLROnPlateau", function() return optim.ReduceLROnPlateau(optim.SGD { parameter() }) end)
object("EMA", function() return optim.EMA(nn.Linear(1, 1)) end)
object("GradScaler", function() return optim.GradScaler() end)
object("Scheduler", function() return optim.Scheduler(optim.SGD { parameter() }, optim.constant()) end)

object("AutoencoderKL", function()
  return require("tycho.models").AutoencoderKL { block_out_channels = { 2, 2 }, norm_num_groups = 1 }
end)
object("UNet", function() return require("tycho.models").UNet { levels = { 8 }, layers = 1 } end)
object("AutoencoderTiny", function()
  return require("tycho.models").AutoencoderTiny { encoder_block_out_channels = { 2 }, num_encoder_blocks = { 1 },
    decoder_block_out_channels = { 2 }, num_decoder_blocks = { 1 } }
end)
object("Fixed", function() return require("tycho.models").Fixed.new(ty.zeros(1, 2, 2, 2)) end)
object("ControlNetModel", function()
  return require("tycho.models").ControlNetModel { block_out_channels = { 4 }, layers_per_block = 1,
    norm_num_groups = 2, cross_attention_dim = 2, attention_head_dim = 2, down_block_types = { "DownBlock2D" },
    conditioning_embedding_out_channels = { 2 } }
end)
object("FluxTransformer2DModel", function()
  return require("tycho.models").FluxTransformer2DModel { in_channels = 8, num_layers = 1, num_single_layers = 1,
    attention_head_dim = 8, num_attention_heads = 1, joint_attention_dim = 2, pooled_projection_dim = 2,
    axes_dims_rope = { 2, 2, 4 } }
end)
object("VonMisesFisher", function()
  return require("tycho.distributions").VonMisesFisher { mean = require("tycho").ones(3), concentration = 2 }
end)
object("WanTransformer3DModel", function()
  return require("tycho.models").WanTransformer3DModel { num_attention_heads = 1, attention_head_dim = 8,
    in_channels = 2, out_channels = 2, text_dim = 2, freq_dim = 8, ffn_dim = 8, num_layers = 1 }
end)
object("ZImageTransformer2DModel", function()
  return require("tycho.models").ZImageTransformer2DModel { in_channels = 2, dim = 8, n_layers = 1,
    n_refiner_layers = 1, n_heads = 1, cap_feat_dim = 2, axes_dims = { 4, 2, 2 }, axes_lens = { 64, 8, 8 } }
end)
object("DiTTransformer2DModel", function()
  return require("tycho.models").DiTTransformer2DModel { sample_size = 4, num_layers = 1, attention_head_dim = 4,
    num_attention_heads = 1, num_embeds_ada_norm = 2 }
end)
object("PixArtTransformer2DModel", function()
  return require("tycho.models").PixArtTransformer2DModel { sample_size = 4, num_layers = 1, attention_head_dim = 4,
    num_attention_heads = 1, cross_attention_dim = 2 }
end)
local function dit() return require("tycho.models").DiT { size = 2, patch = 1, width = 4, depth = 1, heads = 1 } end
object("Blocks", function() return require("tycho.diffusion").blocks(dit()) end)
object("ReplacedAttention", function()
  return require("tycho.diffusion").attention.replace(dit(), function(_, q) return q end)
end)
object("Cells", function() return require("tycho.diffusion").attention.cells { rows = 4, columns = 4 } end)
object("Rettention", function()
  return require("tycho.diffusion").attention.rettention(dit(), { rows = 2, columns = 2, cell = { 1, 1 } })
end)
object("DraftAttention", function()
  return require("tycho.diffusion").attention.draft(dit(), { rows = 2, columns = 2, cell = { 1, 1 } })
end)
object("FlowMap", function()
  return require("tycho.diffusion").FlowMap(require("tycho.models").TimeMLP { width = 4, depth = 1, waves = 4 },
    { width = 4, waves = 4 })
end)
object("GuidanceAdapters", function()
  return require("tycho.distill").GuidanceAdapters(dit(), { hidden = 2 })
end)
object("SubpathStudent", function()
  return require("tycho.distill").SubpathStudent(dit(), { width = 2, waves = 2 })
end)
object("DistributionMatching", function()
  return require("tycho.distill").DistributionMatching(require("tycho.diffusion").Flow(), dit(), { updates = 1 })
end)
object("Teacher", function() return require("tycho.distill").teacher(nn.Linear(2, 2)) end)
object("MaterialStore", function()
  return require("tycho.distill").store("material", { base = "none" }, function() return { x = ty.ones(4, 2) }, 0 end)
end)
object("Comparison", function()
  local diffusion = require "tycho.diffusion"
  local sampler = diffusion.Sampler { schedule = diffusion.schedule.flow(), predict = "flow", steps = 1 }
  return diffusion.compare(dit(), { 1, 1, 2, 2 }, sampler, { same = sampler }, { rounds = 1,
    condition = { labels = ty.tensor { 1 } } })
end)
object("SD3Transformer2DModel", function()
  return require("tycho.models").SD3Transformer2DModel { num_layers = 1, attention_head_dim = 4, in_channels = 2,
    num_attention_heads = 1, joint_attention_dim = 2, pooled_projection_dim = 2, pos_embed_max_size = 2 }
end)
local encoder = { hidden_size = 4, intermediate_size = 4, num_hidden_layers = 1, num_attention_heads = 2,
  image_size = 4, patch_size = 2 }
object("ViT", function() return require("tycho.models").ViT(encoder) end)
object("ViTForImageClassification", function() return require("tycho.models").ViTForImageClassification(encoder) end)
local text = { vocab_size = 8, hidden_size = 4, intermediate_size = 4, num_hidden_layers = 1, num_attention_heads = 2 }
object("CLIPTextModel", function() return require("tycho.models").CLIPTextModel(text) end)
object("T5EncoderModel", function()
  return require("tycho.models").T5EncoderModel { vocab_size = 8, d_model = 4, d_kv = 2, d_ff = 4, num_layers = 1,
    num_heads = 2 }
end)
object("CLIPVisionModel", function() return require("tycho.models").CLIPVisionModel(encoder) end)
object("CLIPModel", function()
  return require("tycho.models").CLIPModel { text_config = text, vision_config = encoder, projection_dim = 2 }
end)
object("Llava", function()
  return require("tycho.models").Llava { text_config = text, vision_config = encoder, image_token_index = 7,
    vision_feature_layer = -1 }
end)
object("EarlyExit", function()
  return require("tycho.vlm").icar.EarlyExit(require("tycho.models").CLIPModel { text_config = text,
    vision_config = { hidden_size = 4, intermediate_size = 4, num_hidden_layers = 2, num_attention_heads = 2,
      image_size = 4, patch_size = 2 }, projection_dim = 2 }, { layer = 1 })
end)
object("KeyQueue", function() return require("tycho.vlm").msd.queue(4) end)
object("SailAlignment", function() return require("tycho.vlm").sail.Alignment { image = 2, text = 2 } end)
object("VLVCaptioner", function()
  local models = require "tycho.models"
  local tower = models.ResNet { in_channels = 3, classes = 1, channels = { 4 }, blocks = { 1 }, small = true }
  local see = require("tycho.vlm").vlv.Encoder(tower, { channels = 4, places = 4, queries = 2, width = 4, layers = 1,
    heads = 2 })
  return require("tycho.vlm").vlv.Captioner(see, models.Llama { vocab_size = 8, hidden_size = 4, intermediate_size = 4,
    num_hidden_layers = 1, num_attention_heads = 2 }, 4)
end)
object("Gaussian", function() return require("tycho.models").Gaussian.new(ty.zeros(1, 2, 2, 2)) end)
object("Cache", function() return require("tycho.llm").Cache.new(2) end)
object("Emoji", function() return require("tycho.datasets").load("emoji", { split = "held_out" }) end)
object("Photos", function() return require("tycho.datasets").load("photos", { split = "held_out" }) end)
object("Crops", function() return require("tycho.datasets").load("photos", { crop = 16 }) end)
object("Scenes", function() return require("tycho.datasets").load("scenes", { length = 4 }) end)
object("Clips", function() return require("tycho.datasets").load("clips", { length = 4 }) end)
object("Signals", function() return require("tycho.datasets").load("signals", { length = 4 }) end)
object("TextTasks", function() return require("tycho.datasets").load("text_tasks", { length = 4 }) end)
object("Volumes", function() return require("tycho.datasets").load("volumes", { size = 32 }) end)
object("ArmEpisodes", function() return require("tycho.datasets").load("arm", { size = 32 }) end)
object("ArmEnv", function()
  local env = require("tycho.datasets").arm.env { size = 32 }
  env:reset(0)
  return env
end)
object("KeyPoses", function()
  local words = require("tycho.diffusion").policy.words { "go" }
  return require("tycho.diffusion").KeyPoses(require("tycho.models").MiniDiffuser { words = 3, size = 16, width = 8,
    channels = 4, phrase = 2, heads = 2 }, words, { phrase = 2 })
end)
object("ChunkPolicy", function()
  return require("tycho.diffusion").ChunkPolicy(require("tycho.models").PixelPolicy { words = 3, size = 16,
    channels = { 8 }, condition = 8, head = 8, depth = 1 })
end)
local function action_model()
  return require("tycho.models").ActionModel { words = { "a", "b" }, image_size = 16, patch_size = 8,
    tower_channels = 2, phrase_length = 2, head_hidden_size = 4, head_layers = 1, head_heads = 2, text_config = {
      hidden_size = 8, intermediate_size = 4, num_hidden_layers = 2, num_attention_heads = 2 } }
end
object("ActionModel", action_model)
object("EfficientPolicy", function() return require("tycho.vlm").efficientvla.apply(action_model()) end)
object("TokenGate", function() return require("tycho.vlm").token_cache.Gate(action_model()) end)
object("CachedPolicy", function()
  local cache = require("tycho.vlm").token_cache
  return cache.apply(action_model(), { choose = cache.chooser "random" })
end)
object("MiniDiffuser", function() return require("tycho.models").MiniDiffuser { words = 3, size = 16, width = 8 } end)
object("PixelPolicy", function() return require("tycho.models").PixelPolicy { words = 3, size = 16 } end)
object("FusedPolicy", function()
  return require("tycho.models").FusedPolicy { semantic = 4, geometric = 4, words = 3, width = 8 }
end)
object("MendEditor", function()
  return require("tycho.peft").mend.editor(nn.Sequential(nn.Linear(2, 2)), { layers = { "0" }, rank = 1 })
end)
object("TokenClassifier", function()
  local bert = require("tycho.models").Bert { vocab_size = 4, hidden_size = 2, num_hidden_layers = 1,
    num_attention_heads = 1, intermediate_size = 2 }
  return require("tycho.peft").token_classification.new(bert, { "O", "B-a" })
end)
local books
object("RefusedBooks", function() -- made once: it reads the Bible
  books = books or require("tycho.datasets").refused_books.new(0)
  return books
end)
object("GeometryNet", function() return require("tycho.models").GeometryNet() end)
object("Random", function() return require("tycho.datasets").random.new(0, "walk", 0) end)
object("Chat", function() return require("tycho.hub").chat.new "{{ messages[0].content }}" end)

local tokenizer = ty.tokenizer.train({ "some words and some more words" }, { vocabulary = 270 })
object("tokenizer", function() return tokenizer end)
table.insert(objects.good, function() return tokenizer end)
table.insert(objects.good, function() return optim.SGD { parameter() } end)
table.insert(objects.good, function() return nn.Sequential(nn.Linear(2, 2), nn.ReLU()) end)
table.insert(objects.good, function() return { ty.ones(2), ty.ones(2) } end)

--- Right arguments of functions, by name: the walk replaces one of them, and so comes to the checks of the others.
objects.calls = {}

local function right(names, make)
  for name in names:gmatch "%S+" do objects.calls[name] = make end
end

local function options() return {} end

right("optim.RMSprop optim.Adagrad optim.Adadelta optim.Adamax optim.NAdam optim.RAdam optim.Rprop optim.ASGD",
  function() return { parameter() }, options() end)
right("optim.LBFGS optim.Muon optim.LAMB optim.Adafactor optim.Shampoo optim.SOAP",
  function() return { parameter() }, options() end)
right("optim.DAdaptAdamW optim.Prodigy optim.DoG optim.ScheduleFree optim.MeZO",
  function() return { parameter() }, options() end)
right("optim.SAM optim.Mechanic optim.ReduceLROnPlateau", function() return optim.SGD { parameter() }, options() end)
right("optim.order_effects", function() return { parameter() }, { optimizer = optim.SGD } end)
right("optim.sequential", function() return { optim.constant(), optim.constant() }, { 3 } end)
right("optim.chained", function() return { optim.constant() } end)
right("optim.cyclic", function() return { up = 4 } end)
right("optim.SGD optim.Adam optim.AdamW optim.Lion optim.GaLore optim.APOLLO optim.FRUGAL",
  function() return { parameter() }, options() end)
right("optim.clip_grad_norm optim.clip_grad_value", function() return { parameter() }, 1 end)
right("optim.cosine optim.linear optim.one_cycle optim.polynomial optim.cosine_restarts",
  function() return { steps = 4 } end)
right("optim.step optim.GradScaler", options)
right("optim.warmup", function() return 3, function() return 1 end end)
right("optim.EMA", function() return nn.Linear(1, 1), options() end)
right("optim.Scheduler", function() return optim.SGD { parameter() }, function() return 1 end end)
right("nn.RNN nn.RNNCell nn.LSTMCell nn.GRUCell nn.EmbeddingBag", function() return 2, 2, options() end)
right("nn.TransformerDecoderLayer", function() return 4, 2, options() end)
right("nn.Transformer", function() return 4, 2, { encoder_layers = 1, decoder_layers = 1, feedforward = 4 } end)
right("nn.TransformerEncoder nn.TransformerDecoder", function() return nn.ReLU(), 2, options() end)
right("nn.InstanceNorm1d nn.InstanceNorm2d nn.InstanceNorm3d nn.LocalResponseNorm", function() return 2, options() end)
right("nn.Bilinear", function() return 2, 2, 2, options() end)
right("nn.weight_norm nn.spectral_norm nn.orthogonal", function() return nn.Linear(2, 2), options() end)
right("nn.register_parametrization", function() return nn.Linear(2, 2), "weight", function(x) return x * 2 end end)
right("nn.is_parametrized nn.remove_parametrization", function() return nn.weight_norm(nn.Linear(2, 2)), "weight" end)
right("nn.rrelu", function() return ty.ones(2), 0.1, 0.2, true end)
right("nn.prelu", function() return ty.ones(2), ty.ones(1) end)
right("nn.poisson_nll_loss nn.hinge_embedding_loss nn.soft_margin_loss nn.multilabel_soft_margin_loss "
  .. "nn.binary_cross_entropy nn.focal_loss nn.dice_loss nn.pairwise_distance",
  function() return ty.ones(2, 3), ty.ones(2, 3), options() end)
right("nn.gaussian_nll_loss nn.triplet_margin_loss", function()
  return ty.ones(2, 3), ty.ones(2, 3), ty.ones(2, 3), options()
end)
right("nn.cosine_embedding_loss nn.margin_ranking_loss", function()
  return ty.ones(2, 3), ty.ones(2, 3), ty.ones(2, 1), options()
end)
right("nn.multi_margin_loss", function() return ty.ones(2, 3), ty.tensor { 0, 1 }, options() end)
right("nn.multilabel_margin_loss", function()
  return ty.ones(2, 3), ty.zeros({ 2, 3 }, { dtype = "i64" }), options()
end)
right("nn.Linear nn.Embedding nn.LSTM nn.GRU nn.SLSTM nn.GroupNorm", function() return 2, 2, options() end)
right("nn.Conv2d nn.Conv1d nn.ConvTranspose2d nn.Conv3d nn.ConvTranspose1d nn.ConvTranspose3d",
  function() return 2, 2, 3, options() end)
right("nn.LayerNorm nn.RMSNorm nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d nn.MaxPool2d nn.AvgPool2d",
  function() return 2, options() end)
right("nn.MaxPool1d nn.MaxPool3d nn.AvgPool1d nn.AvgPool3d nn.MaxUnpool1d nn.MaxUnpool2d nn.MaxUnpool3d",
  function() return 2, options() end)
right("nn.Unfold", function() return 2, options() end)
right("nn.LPPool1d nn.LPPool2d nn.LPPool3d nn.Fold", function() return 2, 2, options() end)
right("nn.MultiheadAttention nn.TransformerEncoderLayer", function() return 4, 2, options() end)
right("nn.normalize", function() return ty.ones(2, 3), options() end)
right("nn.cosine_similarity nn.smooth_l1_loss", function() return ty.ones(2, 3), ty.ones(2, 3), options() end)
right("nn.triplet_loss", function() return ty.ones(2, 3), ty.ones(2, 3), ty.ones(2, 3), options() end)
right("nn.accuracy vision.accuracy", function() return ty.ones(2, 3), ty.tensor { 0, 1 } end)
right("nn.init.uniform nn.init.normal nn.init.trunc_normal", function() return ty.ones(2, 2), 0, 1 end)
right("nn.init.constant nn.init.xavier_uniform nn.init.xavier_normal", function() return ty.ones(2, 2), 1 end)
right("nn.init.kaiming_uniform nn.init.kaiming_normal", function() return ty.ones(2, 2), options() end)
right("nn.with_defaults", function() return options(), function() end end)
right("vjp jvp", function() return ty.sin, ty.ones(2), ty.ones(2), options() end)
right("jacobian", function() return ty.sin, ty.ones(2), options() end)
right("gradcheck", function() return ty.sin, ty.ones(2), options() end)
right("hessian", function() return ty.sum, ty.ones(2), options() end)
right("functional_call", function() return nn.ReLU(), options(), ty.ones(2) end)
right("split chunk", function() return ty.ones(4, 2), 2, 0 end)
right("meshgrid", function() return { ty.arange(2), ty.arange(3) }, options() end)
right("compile fuse checkpoint", function() return function(x) return x end, options() end)
right("plot.grid plot.batch", function() return ty.ones(2, 1, 4, 4), options() end)
right("data.cache", function() return ty.data.TensorDataset { x = ty.ones(4, 2) }, options() end)
right("plot.line", function() return { y = { 1, 2, 3 } } end)
right("tokenizer.train", function() return { "some words" }, options() end)
right("tokenizer.new", function() return { model = "gpt2", tokens = { "a", "b" }, merges = {} } end)
right("tokenizer:encode_batch", function() return { "some", "words" }, { pad_id = 0 } end)
right("tokenizer:decode_batch", function() return { { 1, 2 }, { 3 } }, options() end)
right("data.split", function() return ty.data.TensorDataset { x = ty.ones(4, 2) }, { 0.5, 0.5 }, options() end)
right("data.map", function() return ty.data.TensorDataset { x = ty.ones(4, 2) }, function(x) return x end end)
right("data.subset", function() return ty.data.TensorDataset { x = ty.ones(4, 2) }, { 0, 1 } end)
right("data.concat", function() return ty.data.TensorDataset { x = ty.ones(4, 2) } end)
right("data.DataLoader", function() return ty.data.TensorDataset { x = ty.ones(4, 2) }, options() end)
right("train.steps", function() return nil, 2, options() end)
right("train.progress", function() return 10, { quiet = true } end)
right("train.save_checkpoint train.load_checkpoint", function() return "checkpoint", { a = 1 } end)
right("vision.random_shift", function() return ty.ones(2, 1, 4, 4), 1, 0 end)
right("vision.predict", function() return nn.Flatten(), ty.ones(2, 1, 4, 4) end)
right("diffusion.drop_labels", function() return ty.tensor { 0, 1 }, 0.5, 2 end)
right("llm.bleu.sentence", function() return { 1, 2 }, { { 1, 2, 3 } }, options() end)
right("llm.bleu.batch", function() return { { 1, 2 } }, { { { 1, 2, 3 } } }, options() end)
right("llm.bleu.score", function() return { 1, 1 }, { 2, 1 }, 2, 2, options() end)
right("llm.ngram.train", function() return { "abc" }, options() end)
right("llm.data.join", function() return { { 1, 2 } } end)

return objects
