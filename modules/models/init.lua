--- Networks, one file for each architecture, with the parameter names of the published files: require "tycho.models".
--
--     local models = require "tycho.models"
--     local model = models.Llama { vocab_size = 1000, hidden_size = 64, intermediate_size = 160, num_hidden_layers = 2,
--       num_attention_heads = 4 }
--     local logits = model(tokens)
--
-- A network is nothing but its parameters and what it computes. Files are read by tycho.hub; what one does with a
-- model (generation, schedules, adapters, quantization) is in the module of that method, which no file here requires.

return require "tycho.lazy" ({}, {
  -- language models
  Bert = { "tycho.models.bert", "Bert" }, BertForMaskedLM = { "tycho.models.bert", "BertForMaskedLM" },
  BertForQuestionAnswering = { "tycho.models.bert", "BertForQuestionAnswering" },
  BertForSequenceClassification = { "tycho.models.bert", "BertForSequenceClassification" },
  BertForTokenClassification = { "tycho.models.bert", "BertForTokenClassification" },
  BertLMHeadModel = { "tycho.models.bert", "BertLMHeadModel" }, classifier = "tycho.models.classifier",
  GLA = "tycho.models.gla", GLM = "tycho.models.glm", GPT2 = "tycho.models.gpt2", Llama = "tycho.models.llama",
  Mistral = "tycho.models.mistral",
  Mixtral = "tycho.models.mixtral", Qwen2 = "tycho.models.qwen2",
  Qwen3 = "tycho.models.qwen3", Olmo2 = "tycho.models.olmo2", Phi3 = "tycho.models.phi3",
  GPTNeoX = "tycho.models.gpt_neox", Gemma2 = "tycho.models.gemma2", Gemma3 = "tycho.models.gemma3",
  OPT = "tycho.models.opt", Falcon = "tycho.models.falcon", T5 = "tycho.models.t5",
  T5EncoderModel = "tycho.models.t5_encoder",
  Roberta = { "tycho.models.roberta", "Roberta" },
  RobertaForMaskedLM = { "tycho.models.roberta", "RobertaForMaskedLM" },
  RobertaForQuestionAnswering = { "tycho.models.roberta", "RobertaForQuestionAnswering" },
  RobertaForSequenceClassification = { "tycho.models.roberta", "RobertaForSequenceClassification" },
  RobertaForTokenClassification = { "tycho.models.roberta", "RobertaForTokenClassification" },
  DistilBert = { "tycho.models.distilbert", "DistilBert" },
  DistilBertForMaskedLM = { "tycho.models.distilbert", "DistilBertForMaskedLM" },
  DistilBertForQuestionAnswering = { "tycho.models.distilbert", "DistilBertForQuestionAnswering" },
  DistilBertForSequenceClassification = { "tycho.models.distilbert", "DistilBertForSequenceClassification" },
  DistilBertForTokenClassification = { "tycho.models.distilbert", "DistilBertForTokenClassification" },
  ModernBert = { "tycho.models.modernbert", "ModernBert" },
  ModernBertForMaskedLM = { "tycho.models.modernbert", "ModernBertForMaskedLM" },
  ModernBertForQuestionAnswering = { "tycho.models.modernbert", "ModernBertForQuestionAnswering" },
  ModernBertForSequenceClassification = { "tycho.models.modernbert", "ModernBertForSequenceClassification" },
  ModernBertForTokenClassification = { "tycho.models.modernbert", "ModernBertForTokenClassification" },
  -- pictures
  AutoencoderKL = "tycho.models.autoencoder_kl", Gaussian = "tycho.models.gaussian",
  Fixed = "tycho.models.fixed", TimeMLP = "tycho.models.time_mlp",
  AutoencoderTiny = "tycho.models.autoencoder_tiny", ControlNetModel = "tycho.models.controlnet",
  BitTokenizer = "tycho.models.bit_tokenizer", BitTransformer = "tycho.models.bit_transformer",
  Codebook = "tycho.models.codebook", ScaleTokenizer = "tycho.models.scale_tokenizer", VAR = "tycho.models.var",
  DiT = "tycho.models.dit", DiTTransformer2DModel = "tycho.models.dit2d", DSCNN = "tycho.models.ds_cnn",
  FluxTransformer2DModel = "tycho.models.flux", MobileNetV2 = "tycho.models.mobilenet",
  PixArtTransformer2DModel = "tycho.models.pixart", ResNet = "tycho.models.resnet",
  ResNet1d = "tycho.models.resnet1d", ResNet3d = "tycho.models.resnet3d",
  SD3Transformer2DModel = "tycho.models.sd3",
  UNet = "tycho.models.unet",  UNet2DConditionModel = { "tycho.models.unet2d", "UNet2DConditionModel" },
  UNet2DModel = { "tycho.models.unet2d", "UNet2DModel" },
  WanTransformer3DModel = "tycho.models.wan", ZImageTransformer2DModel = "tycho.models.z_image",
  ViT = { "tycho.models.vit", "ViT" }, ViTForImageClassification = { "tycho.models.vit", "ViTForImageClassification" },
  DeiT = { "tycho.models.vit", "DeiT" },
  DeiTForImageClassification = { "tycho.models.vit", "DeiTForImageClassification" },
  DeiTForImageClassificationWithTeacher = { "tycho.models.vit", "DeiTForImageClassificationWithTeacher" },
  Dinov2 = { "tycho.models.dinov2", "Dinov2" },
  Dinov2ForImageClassification = { "tycho.models.dinov2", "Dinov2ForImageClassification" },
  -- pictures and words
  ActionModel = "tycho.models.action",
  CLIPModel = { "tycho.models.clip", "CLIPModel" }, CLIPTextModel = { "tycho.models.clip", "CLIPTextModel" },
  CLIPTextModelWithProjection = { "tycho.models.clip", "CLIPTextModelWithProjection" },
  CLIPVisionModel = { "tycho.models.clip", "CLIPVisionModel" },
  SiglipModel = { "tycho.models.siglip", "SiglipModel" },
  SiglipTextModel = { "tycho.models.siglip", "SiglipTextModel" },
  SiglipVisionModel = { "tycho.models.siglip", "SiglipVisionModel" },
  ResNetVisionModel = "tycho.models.resnet_vision",
  CLIPVisionModelWithProjection = { "tycho.models.clip", "CLIPVisionModelWithProjection" },
  Llava = "tycho.models.llava", LlavaNext = "tycho.models.llava_next",
  Qwen2VL = { "tycho.models.qwen2_vl", "Qwen2VL" }, Qwen2_5_VL = { "tycho.models.qwen2_vl", "Qwen2_5_VL" },
  FusedPolicy = { "tycho.models.fusion", "FusedPolicy" },
  Fusion = { "tycho.models.fusion", "Fusion" }, GeometryNet = { "tycho.models.fusion", "GeometryNet" },
  PixelPolicy = { "tycho.models.fusion", "PixelPolicy" }, PromptNet = "tycho.models.promptnet",
  MAR = "tycho.models.mar", MiniDiffuser = { "tycho.models.mini_diffuser", "MiniDiffuser" },
  -- their parts: blocks, rotary positions, what they remember of the tokens so far
  layers = "tycho.models.layers", rotary = "tycho.models.rotary", KVCache = "tycho.models.cache",
  StateCache = "tycho.models.states",
}, "tycho.models")
